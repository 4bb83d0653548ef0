"""What the tests of the torch modules compare with: numpy, and no line of mathrl."""

import re

import numpy as np


def softmax(theta):
    weights = np.exp(theta)
    return weights / weights.sum()


def gradient(function, theta):
    """Gradient of an analytic function by the complex step: exact to rounding, no derivation."""
    theta, step = np.asarray(theta, dtype=complex), 1e-200
    shifts = 1j * step * np.eye(len(theta))
    return np.array([function(theta + shift).imag / step for shift in shifts])


def refuses(error, words, function, *args, **kwargs):
    """Assert that a call raises exactly this error with these words in its message."""
    caught = None
    try:
        function(*args, **kwargs)
    except Exception as problem:
        caught = problem
    assert type(caught) is error, f"expected {error.__name__}, got {caught!r}"
    assert re.search(words, str(caught)), f"{words!r} is not in {str(caught)!r}"


def fails(check, *args):
    """Assert that a check rejects what it is given: a check that cannot fail checks nothing."""
    try:
        check(*args)
    except AssertionError:
        return
    raise AssertionError(f"{check.__name__} passed on a wrong version")

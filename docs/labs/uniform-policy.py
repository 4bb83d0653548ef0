# %% [markdown]
# # Lab: the uniform policy, counted and simulated
#
# A policy that picks both digits uniformly is the one policy whose every number can be written down
# before anything runs. This lab enumerates its hundred paths for each of the 25 tasks, then draws
# 100,000 groups of eight responses and asks whether the simulation agrees with the count.

# %%
# %config InlineBackend.figure_formats = ["svg"]
from math import comb, sqrt

import matplotlib.pyplot as plt
import numpy as np
from IPython.display import display

from mathrl.arithmetic import TASKS, responses, target, verify

plt.rcParams |= {"svg.hashsalt": "mathrl", "figure.facecolor": "none", "axes.facecolor": "none"}

# %% [markdown]
# ## Every path, counted
#
# Each response has probability 1/100. The success probability of a task is the number of paid
# responses over 100; the reasons for failure share the rest.

# %%
paths = responses()
verdicts = {task: [verify(task, path) for path in paths] for task in TASKS}
paid = {task: sum(verdict["reward"] for verdict in row) for task, row in verdicts.items()}
print("paid responses per task:", sorted(set(paid.values())))

reasons = [verdict["reason"] for row in verdicts.values() for verdict in row]
for reason in ("ok", "final", "intermediate"):
    print(f"{reason:13} {reasons.count(reason) / len(reasons):.2f}")

# %% [markdown]
# A policy that is judged by its final digit alone would look ten times better.

# %%
lucky = {task: sum(path[1] == target(task)[1] for path in paths) for task in TASKS}
print("responses with the right final digit per task:", sorted(set(lucky.values())))

# %% [markdown]
# ## Groups of eight
#
# In a group of eight independent responses the number of successes is binomial with p = 1/100. The
# group teaches nothing when every reward is equal, which here means: when nobody succeeded, up to a
# chance of 10⁻¹⁶ that all eight did.

# %%
p, size, groups = 0.01, 8, 100_000
theory = np.array([comb(size, k) * p**k * (1 - p) ** (size - k) for k in range(size + 1)])
print(f"no success:           {theory[0]:.4f}")
print(f"at least one success: {1 - theory[0]:.4f}")

# %% [markdown]
# The simulation draws digits, not successes: it samples responses and sends every one of the
# 800,000 through the verifier.

# %%
rng = np.random.default_rng(0)
drawn = rng.integers(len(paths), size=(groups, size))
tasks = rng.integers(len(TASKS), size=groups)
reward = np.array([[verdict["reward"] for verdict in verdicts[task]] for task in TASKS])
successes = reward[tasks[:, None], drawn].sum(axis=1)
simulated = np.bincount(successes, minlength=size + 1) / groups

print("successes  theory    simulated  standard errors apart")
for k in range(4):
    error = sqrt(theory[k] * (1 - theory[k]) / groups)
    print(f"{k:9}  {theory[k]:.6f}  {simulated[k]:.6f}  {(simulated[k] - theory[k]) / error:+.2f}")

# %% [markdown]
# ## How large a group must be
#
# The chance that a group is silent falls slowly with its size. The curve is the formula; the dots
# are prefixes of the same simulated groups.

# %%
sizes = np.arange(1, 9)
silent = [(np.cumsum(reward[tasks[:, None], drawn], axis=1)[:, n - 1] == 0).mean() for n in sizes]

figure, axes = plt.subplots(figsize=(6, 3.2))
grid = np.arange(1, 513)
axes.plot(grid, (1 - p) ** grid, color="#1f77b4", label="0.99 to the power G")
axes.plot(sizes, silent, "o", color="#d95f02", markersize=4, label="simulated")
axes.set(xscale="log", xlabel="group size G", ylabel="probability of no success", ylim=(0, 1.03))
axes.spines[["top", "right"]].set_visible(False)
axes.legend(frameon=False)
alt = (
    "The probability that a group has no success falls from 0.99 at one response, through one half "
    "at 69, to nearly 0 at 512; eight simulated points lie on the curve."
)
display(figure, metadata={"image/svg+xml": {"alt": alt}})
plt.close(figure)

# %% [markdown]
# At G = 69 half of the groups still say nothing. Sampling more is one way out of the silence; the
# chapters on training compare it with the others.

# %%
print(next(n for n in grid if (1 - p) ** n < 0.5))

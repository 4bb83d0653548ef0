"""Several processes that train one model: what is shared out, and what is added up.

Started alone, a program is a group of one and every function here does nothing. Started by
`torchrun`, each process holds the whole model and a share of the batch; losses are divided by the
count of the whole batch, so that the sum of the processes' gradients is the gradient of the whole.
"""

import contextlib
import os
from collections.abc import Iterable, Iterator

import torch
import torch.distributed as dist
from torch import Tensor, nn


@contextlib.contextmanager
def connected(backend: str | None = None) -> Iterator[None]:
    """Join the processes that `torchrun` started, if it did, until the block ends.

    Args:
        backend: by default nccl where there is a GPU, else gloo.

    >>> with connected():
    ...     rank(), size()
    (0, 1)
    """
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        yield
        return
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group(backend or ("nccl" if torch.cuda.is_available() else "gloo"))
    try:
        yield
    finally:
        dist.destroy_process_group()


def rank() -> int:
    """The number of this process, from 0."""
    return dist.get_rank() if dist.is_initialized() else 0


def size() -> int:
    """The number of processes."""
    return dist.get_world_size() if dist.is_initialized() else 1


def share(count: int) -> slice:
    """The rows of a batch of `count` that belong to this process; shares differ by one at most.

    Raises:
        ValueError: there are more processes than rows.

    >>> share(20)
    slice(0, 20, None)
    """
    if count < size():
        raise ValueError(f"a batch of {count} rows cannot be shared by {size()} processes")
    start, stop = (count * part // size() for part in (rank(), rank() + 1))
    return slice(start, stop)


def total(tensor: Tensor) -> Tensor:
    """The sum of a tensor over the processes, without gradient."""
    summed = tensor.detach().clone()
    if size() > 1:
        dist.all_reduce(summed)
    return summed


def gather(rows: Tensor, mine: slice, count: int) -> Tensor:
    """All `count` rows of the batch, of which this process holds those of its share."""
    if size() == 1:
        return rows
    whole = rows.new_zeros(count, *rows.shape[1:])
    whole[mine] = rows
    return total(whole)


def same_start(model: nn.Module) -> None:
    """Give every process the parameters of process 0."""
    if size() > 1:
        for parameter in model.parameters():
            dist.broadcast(parameter.data, src=0)


def add_gradients(parameters: Iterable[nn.Parameter]) -> None:
    """Replace each gradient by its sum over the processes, in one message."""
    if size() > 1:
        gradients = [p.grad for p in parameters if p.grad is not None]
        message = torch.cat([gradient.flatten() for gradient in gradients])
        dist.all_reduce(message)
        pieces = torch.split(message, [gradient.numel() for gradient in gradients])
        for gradient, piece in zip(gradients, pieces, strict=True):
            gradient.copy_(piece.view_as(gradient))

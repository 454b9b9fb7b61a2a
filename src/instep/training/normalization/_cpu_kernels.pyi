"""cpu_kernels.c: tensors are given by the address of their values, numbers as bytes."""

INTERFACE: int

def moments(x: int, rows: int, channels: int, size: int, /) -> bytes: ...
def merge(moments: bytes, channels: int, /) -> bytes: ...
def update_running(
    running_mean: int | None,
    running_var: int | None,
    channels: int,
    statistics: bytes,
    momentum: float,
    /,
) -> None: ...
def normalize(
    x: int,
    rows: int,
    channels: int,
    size: int,
    statistics: bytes,
    eps: float,
    weight: int | None,
    bias: int | None,
    output: int,
    /,
) -> None: ...
def sums(
    grad: int,
    x: int,
    rows: int,
    channels: int,
    size: int,
    statistics: bytes,
    eps: float,
    weight_grad: int,
    bias_grad: int,
    /,
) -> bytes: ...
def input_gradient(
    grad: int,
    x: int,
    rows: int,
    channels: int,
    size: int,
    statistics: bytes,
    eps: float,
    weight: int | None,
    sums: bytes,
    output: int,
    /,
) -> None: ...

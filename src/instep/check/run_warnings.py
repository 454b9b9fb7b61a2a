"""The codes of the warnings that a job prints while it runs, and their pages.

A warning ends with its code: `... [INS703]`. A code never changes its meaning.
"""

from __future__ import annotations

from dataclasses import dataclass

TITLE = "While a job runs"

_FILTER = (
    "To hide it: "
    '`warnings.filterwarnings("ignore", message=".*{code}", category=instep.errors.InstepWarning)`.'
)
_LINE = "It is one line on stderr, not a warning of Python's."


@dataclass(frozen=True)
class RunWarning:
    """One warning."""

    code: str
    """INS7 and two digits."""
    name: str
    """The same in words: `gradient-not-finite`."""
    sentence: str
    """The warning in one sentence."""
    explanation: str
    """What it means, and what to do."""
    of_python: bool = False
    """Whether it is an InstepWarning, which Python's filters can hide, and not a line on stderr."""

    @property
    def severity(self) -> str:
        """Its severity, as that of a rule."""
        return "warning"

    @property
    def page(self) -> str:
        """Its documentation in Markdown."""
        ending = _FILTER.format(code=self.code) if self.of_python else _LINE
        return f"{self.explanation}\n\n{ending}"


_ALL = (
    RunWarning(
        "INS701",
        "drawn-by-rank",
        "A forward draws random numbers that cannot be those of the whole batch.",
        """\
The warning names the line. Each rank draws other numbers there, so the
training is not that of one process. The usual cause is a draw whose shape does not contain the
number of rows, or a function that instep does not know. Where the warning speaks of other shapes on
other ranks, each rank has padded sequences to the longest of its own rows: pad them to one length.

Draw the numbers for the whole batch outside of `forward`, and divide them:

```python
noise = instep.shard(torch.randn(len(batch), 8))
```""",
        of_python=True,
    ),
    RunWarning(
        "INS702",
        "gradient-not-finite",
        "A gradient is infinite or not a number.",
        """\
The warning names the parameter and, where the ranks have parts of the gradient, the rank and its
samples. Training goes on. Usual causes: a learning rate that is too high, a logarithm or a division
of zero, a sample with a value that is not finite, float16 without a loss scale.

`INSTEP_NAN=error` ends the job at that step, `INSTEP_NAN=off` switches the check off.""",
        of_python=True,
    ),
    RunWarning(
        "INS703",
        "ranks-differ",
        "A parameter or buffer has slightly different values on different ranks.",
        """\
The warning names it, the ranks and the steps between which it changed. It is a warning and not an
error where the difference is no more than rounding, or concerns a buffer.

Of rounding there is one warning for a model. Some functions of linear algebra, such as
`torch.linalg.lstsq`, round differently where their arguments lie elsewhere in memory, so also in
each process. A parameter that a script sets by one of them is right on each rank.

Otherwise look for a write to it under `if instep.rank == 0`, a file that one rank has read, or
random numbers of a generator of your own. `INSTEP_DRIFT_STEPS=1` compares at each step and names
the step.""",
        of_python=True,
    ),
    RunWarning(
        "INS704",
        "damaged-checkpoint",
        "A checkpoint is damaged and is passed over.",
        """\
A file of the checkpoint is missing, cut off or changed. The training goes on from the checkpoint
before it. Look at the disk, and delete the folder that the warning names.""",
        of_python=True,
    ),
    RunWarning(
        "INS705",
        "ranks-on-cpu",
        "This machine's accelerator has no backend of torch.distributed.",
        """\
Several ranks compute on the CPU, because they could not exchange tensors on the accelerator (MPS,
for example). One rank, `instep run -n 1`, uses the accelerator. `INSTEP_DEVICE=cpu` says that the
CPU is meant, and there is no warning.""",
        of_python=True,
    ),
    RunWarning(
        "INS706",
        "devices-changed-late",
        "The variable of visible devices was changed after PyTorch had read it.",
        """\
The script sets CUDA_VISIBLE_DEVICES (or the variable that the warning names) after something has
used the accelerator, so this rank sees other devices than the variable says. Set the variable
before the start, or leave the choice to instep: each rank takes the device of its local rank.""",
        of_python=True,
    ),
    RunWarning(
        "INS707",
        "argument-ignored",
        "An argument of another library's interface has no effect here.",
        """\
The warning names the argument. instep's implementation of Apex's interface takes it and ignores it,
since each rank has one device. Leave it out.""",
        of_python=True,
    ),
    RunWarning(
        "INS708",
        "copy-trains-alone",
        "A copy of a replicated model is trained, and is no replica.",
        """\
`copy.deepcopy(model)`, or a pickled model that is loaded again, is an ordinary module: its
gradients and, in training mode, its batch statistics and dropout masks are those of this rank's
rows, and the copies of the ranks become different. A copy in evaluation mode (a moving average, a
teacher) is no cause for the warning, unless it has batch normalisation without running statistics
(`track_running_stats=False`), which takes those of the batch then, too. A teacher in training mode
is a cause, also under `torch.no_grad()`; so is a model that was made before `instep.replicate` was
called, such as an `AveragedModel` for which `update_bn` is called.

To train such a copy, to call it, or to call `update_bn` for it, replicate it, too:

```python
copy = instep.replicate(copy.deepcopy(model))
```""",
        of_python=True,
    ),
    RunWarning(
        "INS709",
        "placeholder-counted",
        "What a script adds up over the ranks counts a placeholder.",
        """\
A batch has fewer rows than there are ranks. A rank without rows runs one sample of that batch in
training, so that all ranks come to the same collectives; gradients, batch statistics and instep's
metrics leave it out. What the script or torchmetrics computes from it does not: `len(x)` is 1
there, too. In an evaluation, under `torch.no_grad()`, there are no such samples.
Where the line is about something else, such as a time, the warning means nothing.

Add up by what leaves it out, or let every batch have a row for each rank (`drop_last=True`):

```python
mean = instep.Mean()
mean.update(loss.detach(), len(x))  # in place of total += instep.all_reduce(loss * len(x))
```""",
        of_python=True,
    ),
    RunWarning(
        "INS710",
        "drawn-in-a-thread",
        "A thread iterates over a sharded loader that draws random numbers.",
        """\
Random numbers of samples, and of samplers that are not torch's own, come from the global
generators, which instep sets for them and sets back. The main thread has the same generators: what
it draws meanwhile are other numbers than those of one process, and the ranks may get out of step.
Let a worker load the samples (`num_workers=1` loads ahead, too), or iterate in the main thread.""",
        of_python=True,
    ),
    RunWarning(
        "INS711",
        "computed-whole",
        "Every rank computes a module's whole batch.",
        """\
The module gave other results when its rows were divided, or it cannot be divided; the line says
why. From there on its numbers are right, and this module is not faster on several ranks. Where the
line ends with "may differ from one process already", it also names calls before it that were
divided: run the script on one process if their numbers matter. [Common
reasons](../unedited-scripts.md#what-is-computed-whole).""",
    ),
    RunWarning(
        "INS712",
        "nothing-divided",
        "No call of a module could be divided in the whole run.",
        """\
instep divides calls of `torch.nn.Module`s that have parameters. It does not see calls of a class
that defines `__call__` itself, or a model that consists of tensors and functions. The numbers are
right; the run is not faster. [The two lines](../ways.md) divide such a script.""",
    ),
    RunWarning(
        "INS713",
        "data-loaded-by-all",
        "Every rank loads all samples of a data set.",
        """\
Ranks load their own samples and exchange them, unless a sample cannot be sent, the data set draws
from a generator of its own, or loading samples writes files, changes numbers of the data set or
prints; the line says which. The numbers are right, and loading is not faster on several ranks.

Data that make their batches themselves (iterable data sets) are loaded by every rank without a
line. Where the ranks' workers wait for cores, and the ranks for the workers, each worker loads on
one rank for all: the batches, and their order, are those of one process. If workers then print or
write files, which only counts on rank 0, a line says so. If the workers of two ranks load other
batches, since a worker draws with a seed from the clock or from its process id, a line says so, and
all ranks get those of one.""",
    ),
    RunWarning(
        "INS714",
        "runs-as-it-is",
        "instep does not divide the work of a script.",
        """\
The script divides its work itself: it uses instep's functions, a process group, Horovod or
DistributedDataParallel, or asks a trainer for several devices. The line says why, and what this
means for the batch. For a script that calls `instep.shard` it is only information: all is well. In
one that calls other functions of instep only, `instep.shard(loader)` may have been forgotten. If
instep is to divide the script by itself, remove those calls. `--plain` says that this is meant, and
there is no line.""",
    ),
    RunWarning(
        "INS715",
        "no-shared-memory",
        "The ranks of one host talk through Gloo instead of shared memory.",
        """\
The collectives work, and are slower. The line says why: too little memory, ranks in different
containers, or ranks of different users. `INSTEP_BACKEND=gloo` says that this is meant, and there is
no line.""",
    ),
    RunWarning(
        "INS716",
        "divisor-not-stated",
        "A loss divides by something else than its rows, or by nothing.",
        """\
The gradient of a rank's loss has the weight of its rows. That is the gradient of the whole batch
where the loss is a mean over rows. Class weights, an ignored class, a mean over tokens or over some
of the rows, and sums need another weight. State it before `backward()`. For a sum, also one that is
divided by a constant (`loss.sum() / 64`), it is `instep.weight(None)`. While the ranks have equal
numbers of rows, such a constant looks like a mean over columns: the warning comes with the first
batch that is divided unevenly, or with the next `backward()`, which shows whether batches are
accumulated.

```python
loss = cross_entropy(model(x), y, weight=weights, ignore_index=-1)
instep.weight(weights[y[y != -1]].sum())  # of this rank's rows
loss.backward()
```""",
        of_python=True,
    ),
    RunWarning(
        "INS717",
        "one-process",
        "Rank 0 goes on alone, and the other ranks have ended.",
        """\
On a CPU one process uses all cores already, and ranks on these cores do not always gain. Where an
unedited script takes less time as one process, or nothing of it pays to be divided, rank 0 goes on
with the cores of all ranks of its host. The numbers are the same up to rounding, as for any number
of threads. [When this is decided](../unedited-scripts.md#when-rank-0-goes-on-alone).
`INSTEP_DIVIDE=always` keeps all ranks.""",
    ),
    RunWarning(
        "INS718",
        "trained-by-each-rank",
        "Each rank trains a model of its own on its rows.",
        """\
An optimizer steps with other gradients on each rank, after a batch of `instep.shard`, and what it
trains is in no replica: each rank has a model of its own, trained on 1/N of the data. What the
script prints and saves is one of these models. `instep check` finds most of such places beforehand
([INS309](INS309-not-replicated.md)).

```python
model = instep.replicate(model)  # before the loop
```

There is no warning where only some ranks train (in `instep.single_process_scope`), or where the
script itself sums the gradients. A script that lets its models differ for some steps on purpose,
and averages them later, hides it.""",
        of_python=True,
    ),
    RunWarning(
        "INS719",
        "iterated-by-some-ranks",
        "Not all ranks iterate over a sharded loader to its end.",
        """\
A rank has come to the end of a loader of `instep.shard`, and another one has ended its script
without, or has come to the end of another loader instead. The usual cause is an evaluation under
`if instep.rank == 0`: the loop has the rows of this one rank, and the number that it prints is that
of 1/N of the data. Ranks compare such ends without waiting for each other, so that the warning may
come an epoch later, or at the end of the script.

```python
accuracy = instep.Accuracy()
for x, y in test_loader:  # on every rank
    accuracy.update(model(x), y)
(top1,) = accuracy.compute()
if instep.rank == 0:
    print(top1)
```

Or let rank 0 iterate over a loader that was not given to `instep.shard`.""",
        of_python=True,
    ),
)
RUN_WARNINGS: dict[str, RunWarning] = {each.code: each for each in _ALL}

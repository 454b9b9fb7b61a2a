"""What goes wrong in the use of Horovod's interface. The sentence lives in the class.

InstepError
├── NotInitializedError   (ValueError) before init() or after shutdown()
├── NotThereError         (NotImplementedError, AttributeError) a part that instep does not have
├── WrongArgumentError    (ValueError) names, splits, groups, process sets
├── UnsupportedOpError    (ValueError, RuntimeError) a reduction that this collective cannot make
└── OutOfTurnError        (AssertionError) backward, zero_grad and step in an order that loses data

The built-in types are those that Horovod raises, so scripts that catch them still do.
"""

from __future__ import annotations

from collections.abc import Iterable

from instep.errors import InstepError


class NotInitializedError(InstepError, ValueError):
    """Nobody has called init()."""

    def __init__(self) -> None:
        super().__init__("Horovod's interface is not initialized on this rank; call hvd.init().")


class NotThereError(InstepError, NotImplementedError, AttributeError):
    """A part of Horovod that instep does not have."""

    @classmethod
    def elastic(cls) -> NotThereError:
        """Jobs that grow and shrink."""
        return cls(
            "hvd.elastic is not there: instep's jobs keep their number of ranks. Write checkpoints "
            "and start the script again, at any number of ranks."
        )

    @classmethod
    def timeline(cls) -> NotThereError:
        """Horovod's trace of collectives."""
        return cls("hvd's timeline is not there. torch.profiler records the collectives' times.")

    @classmethod
    def communicator(cls) -> NotThereError:
        """MPI's objects."""
        return cls(
            "MPI communicators are not there. Give process sets as lists of ranks; init() takes "
            "no comm: the launcher decides which ranks there are."
        )


class WrongArgumentError(InstepError, ValueError):
    """An argument that cannot be meant."""

    @classmethod
    def op_and_average(cls) -> WrongArgumentError:
        """Both ways to name the reduction."""
        return cls("give op or average, not both; op=hvd.Average is what average=True was.")

    @classmethod
    def splits(cls, splits: list[int], rows: int, size: int) -> WrongArgumentError:
        """Rows of an alltoall that do not add up."""
        return cls(
            f"splits of alltoall are {size} numbers of rows, one for each rank, that add up to "
            f"the tensor's {rows}; got {splits}."
        )

    @classmethod
    def uneven(cls, rows: int, size: int) -> WrongArgumentError:
        """An alltoall without splits."""
        return cls(
            f"alltoall without splits gives each of {size} ranks the same number of rows, but "
            f"this tensor has {rows}. Give splits."
        )

    @classmethod
    def splits_kind(cls, dtype: object) -> WrongArgumentError:
        """Splits that are no numbers of rows."""
        return cls(f"splits of alltoall are integers (torch.int32), not {dtype}.")

    @classmethod
    def scalar(cls, name: str) -> WrongArgumentError:
        """No dimension 0 where rows are gathered or divided."""
        return cls(f"{name} needs a tensor with rows; this one has no dimension. Reshape it first.")

    @classmethod
    def root(cls, root: int, members: Iterable[int]) -> WrongArgumentError:
        """A root that does not take part."""
        ranks = ", ".join(map(str, members))
        return cls(f"root_rank {root} does not take part; the ranks are {ranks}.")

    @classmethod
    def no_tensors(cls, name: str) -> WrongArgumentError:
        """An empty group."""
        return cls(f"{name} takes at least one tensor.")

    @classmethod
    def mixed(cls, name: str, kinds: Iterable[str]) -> WrongArgumentError:
        """A group of several dtypes."""
        return cls(f"{name} takes tensors of one dtype on one device, not {', '.join(kinds)}.")

    @classmethod
    def not_pairs(cls) -> WrongArgumentError:
        """named_parameters without names."""
        return cls(
            "named_parameters is a sequence of pairs (name, parameter), such as "
            "model.named_parameters()."
        )

    @classmethod
    def same_names(cls, names: Iterable[str]) -> WrongArgumentError:
        """Two parameters of one name."""
        return cls(
            f"ranks are matched by parameter names, and these occur more than once: "
            f"{', '.join(names)}. Put something before the names of each model."
        )

    @classmethod
    def unnamed(cls, shapes: Iterable[tuple[int, ...]]) -> WrongArgumentError:
        """Parameters of the optimizer that named_parameters leaves out."""
        return cls(
            "named_parameters does not name every parameter of the optimizer; without a name are "
            f"those of shape {', '.join(map(str, shapes))}. Name all of them, or none."
        )

    @classmethod
    def groups(cls) -> WrongArgumentError:
        """groups= with something else."""
        return cls(
            "groups is a number of groups from 1 up, or a list of lists of parameters in which "
            "each parameter occurs once."
        )

    @classmethod
    def passes(cls, value: object) -> WrongArgumentError:
        """backward_passes_per_step below 1."""
        return cls(f"backward_passes_per_step is a whole number from 1 up, not {value!r}.")

    @classmethod
    def predivide(cls) -> WrongArgumentError:
        """A split average of something that is no average."""
        return cls("gradient_predivide_factor splits the factor of an average: leave op=Average.")

    @classmethod
    def parameters(cls, kind: str) -> WrongArgumentError:
        """broadcast_parameters with something else."""
        return cls(
            f"broadcast_parameters takes model.state_dict(), or a list of tensors or of pairs "
            f"(name, tensor), not {kind}."
        )

    @classmethod
    def ranks(cls, ranks: object) -> WrongArgumentError:
        """A process set of something else than ranks."""
        return cls(f"a process set is a list of different ranks, not {ranks!r}.")

    @classmethod
    def same_set(cls, ranks: list[int]) -> WrongArgumentError:
        """A process set that exists already."""
        return cls(
            f"there is a process set of the ranks {ranks} already. Keep the object that "
            "add_process_set returned, or remove it first."
        )

    @classmethod
    def no_set(cls, ranks: list[int] | None) -> WrongArgumentError:
        """A process set that was not added, or was removed."""
        return cls(
            f"the process set of the ranks {ranks} is not registered. Call "
            "hvd.add_process_set(ranks) on every rank after hvd.init()."
        )


class UnsupportedOpError(InstepError, ValueError, RuntimeError):
    """A reduction that this collective does not make."""

    def __init__(self, collective: str, op: object, known: Iterable[str]) -> None:
        super().__init__(f"{collective} does not make {op}; it makes {', '.join(known)}.")

    @classmethod
    def adasum_size(cls, size: int) -> UnsupportedOpError:
        """Adasum pairs the ranks."""
        return cls("Adasum", f"{size} ranks", ["pairs, of 1, 2, 4, 8, ... ranks"])

    @classmethod
    def adasum_set(cls) -> UnsupportedOpError:
        """Adasum in a process set."""
        return cls("Adasum", "a process set", ["all ranks together"])


class OutOfTurnError(InstepError, AssertionError):
    """A training loop in an order that would lose gradients."""

    @classmethod
    def too_many_passes(cls, name: str, passes: int) -> OutOfTurnError:
        """One backward more than was announced."""
        return cls(
            f"the gradient of {name} was computed more than backward_passes_per_step={passes} "
            "times since the last step(). Call step() or synchronize() before the next backward, "
            "or raise backward_passes_per_step to accumulate."
        )

    @classmethod
    def zero_grad(cls) -> OutOfTurnError:
        """Gradients are on their way."""
        return cls(
            "zero_grad() between backward() and step() or synchronize(): the gradients are being "
            "averaged right now. Call it after step(), or before backward()."
        )

    @classmethod
    def skip_with_adasum(cls) -> OutOfTurnError:
        """Adasum combines the steps, not the gradients."""
        return cls("skip_synchronize() has no meaning with Adasum, which combines whole steps.")

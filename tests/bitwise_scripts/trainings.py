"""Small single-process trainings, by name, in which bits could depend on how a batch is divided.

python trainings.py NAME [FAULT]
"""

import sys

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset

name, fault = (*sys.argv[1:], "")[:2]
STEPS = 5
torch.manual_seed(0)
IMAGES, LABELS = torch.randn(64, 3, 8, 8), torch.randint(0, 10, (64,))


def batches(size):
    loader = DataLoader(TensorDataset(IMAGES, LABELS), batch_size=size, shuffle=True)
    while True:
        yield from loader


class Residual(nn.Module):
    """Its input has three gradients to be added up, two of them behind batch statistics."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.BatchNorm2d(8), nn.BatchNorm2d(8)
        self.wide, self.narrow = nn.Conv2d(8, 8, 3, padding=1), nn.Conv2d(8, 8, 1)

    def forward(self, x):
        return x + self.wide(F.relu(self.first(x))) + self.narrow(F.relu(self.second(x)))


def cnn():
    return nn.Sequential(
        nn.Conv2d(3, 8, 3), Residual(), nn.Dropout(0.2), nn.Flatten(), nn.Linear(288, 10)
    )


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        layer = nn.TransformerEncoderLayer(24, 4, 32, dropout=0.1, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(24, 10)

    def forward(self, x):
        return self.head(self.encoder(x.flatten(1).view(-1, 8, 24)).mean(1))


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.cells, self.head = nn.GRU(24, 16, 2, dropout=0.1, batch_first=True), nn.Linear(16, 10)

    def forward(self, x, state):
        y, state = self.cells(x.flatten(1).view(-1, 8, 24), state)
        return self.head(y[:, -1]), state


class Checkpointed(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = cnn()

    def forward(self, x):
        return checkpoint(self.layers, x, use_reentrant=False, preserve_rng_state=True)


class Experts(nn.Module):
    """Each row goes to one expert, so that some shards have no gradient of some parameters."""

    def __init__(self):
        super().__init__()
        self.experts, self.head = (
            nn.ModuleList(nn.Linear(192, 16) for _ in range(8)),
            nn.Linear(16, 10),
        )

    def forward(self, x):
        rows = x.flatten(1)
        chosen = (rows[:, 0] * 1000).long().remainder(len(self.experts))
        hidden = rows.new_zeros(len(rows), 16)
        for k, expert in enumerate(self.experts):
            if (mask := chosen == k).any():
                hidden = hidden.index_put((mask,), expert(rows[mask]))
        return self.head(hidden)


class InAList(nn.Module):
    """It reads parameters from a list of its own, too."""

    def __init__(self):
        super().__init__()
        self.first, self.head = nn.Linear(192, 16), nn.Linear(16, 10)
        self.own = [self.first.weight, self.first.bias]

    def forward(self, x):
        return self.head(F.linear(x.flatten(1), *self.own).relu())


class Words(nn.Module):
    """Its table has a sparse gradient, and none on shards of which no row is chosen."""

    def __init__(self):
        super().__init__()
        self.table, self.head = nn.Embedding(50, 8, sparse=True), nn.Linear(8, 10)

    def forward(self, x):
        rows = x.flatten(1)[:, :9]
        words, chosen = (rows * 1000).long().remainder(50), rows[:, 0] > 1
        hidden = rows.new_zeros(len(rows), 8)
        if chosen.any():
            hidden = hidden.index_put((chosen,), self.table(words[chosen]).sum(1))
        return self.head(hidden + rows[:, 1:])


class Large(nn.Module):
    """Its weights are larger than a batch. One is used twice and once more otherwise, and one on
    few shards only. The convolution's is used for images of two sizes."""

    def __init__(self):
        super().__init__()
        self.stem, self.conv = nn.Conv2d(3, 128, 4, 4), nn.Conv2d(128, 256, 3, padding=1)
        self.first, self.tied, self.rare = (nn.Linear(n, 700) for n in (192, 700, 700))
        self.widen, self.relu = nn.Linear(192, 1400), nn.ReLU(inplace=True)
        self.narrow, self.head = nn.Linear(1400, 700, bias=False), nn.Linear(700, 10)

    def forward(self, x):
        rows = x.flatten(1)
        hidden = self.relu(self.first(rows)) + self.narrow(self.relu(self.widen(rows)))
        hidden = self.tied(self.relu(self.tied(hidden))) + hidden @ self.tied.weight
        if (mask := rows[:, 0] > 1).any():
            hidden = hidden.index_put((mask,), self.rare(hidden[mask]))
        images = self.relu(self.stem(x))
        pooled = [self.conv(each).mean((2, 3)) for each in (images, F.max_pool2d(images, 2))]
        return self.head(F.dropout(hidden, 0.1)) + (pooled[0] * pooled[1])[:, :10]


class LongSum(nn.Module):
    """It adds up more numbers than a thread takes, so the result depends on the threads."""

    def __init__(self):
        super().__init__()
        self.table, self.layers = nn.Parameter(torch.randn(300, 1000)), cnn()

    def forward(self, x):
        return self.layers(x) + self.table.square().sum() / 1e6


class WithLoss(nn.Module):
    """A model that returns its loss, over labels of which some are ignored."""

    def __init__(self):
        super().__init__()
        self.layers = cnn()

    def forward(self, x, y):
        return F.cross_entropy(self.layers(x), y, ignore_index=3)


def supervised(model, size=26, every=1, half=False):
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)
    data = batches(size)
    for _ in range(STEPS):
        for _ in range(every):
            x, y = next(data)
            with torch.autocast("cpu", torch.bfloat16, enabled=half):
                loss = model(x, y) if isinstance(model, WithLoss) else F.cross_entropy(model(x), y)
            (loss / every).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()


def large():
    """With gradients of inputs alone, and some that are differentiated again."""
    model, data = Large(), batches(26)
    optimizer = torch.optim.Adam(model.parameters(), 1e-4)
    for step in range(STEPS):
        x, y = next(data)
        x.requires_grad_()
        loss = F.cross_entropy(model(x), y)
        if step % 2:
            (penalty,) = torch.autograd.grad(loss, x, create_graph=step == 1, retain_graph=True)
            loss = loss + penalty.square().sum()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def sparse():
    model, data = Words(), batches(26)
    optimizers = [
        torch.optim.SparseAdam(model.table.parameters(), 1e-2),
        torch.optim.Adam(model.head.parameters(), 1e-2),
    ]
    for _ in range(STEPS):
        x, y = next(data)
        model.zero_grad()
        F.cross_entropy(model(x), y).backward()
        for optimizer in optimizers:
            optimizer.step()


def adversarial():
    maker = nn.Sequential(
        nn.ConvTranspose2d(6, 8, 4), nn.BatchNorm2d(8), nn.ReLU(), nn.ConvTranspose2d(8, 3, 2, 2)
    )
    critic = nn.Sequential(
        nn.Conv2d(3, 8, 4, 2), nn.BatchNorm2d(8), nn.LeakyReLU(0.2), nn.Flatten(), nn.Linear(72, 1)
    )
    optimizers = [torch.optim.Adam(model.parameters(), 1e-3) for model in (maker, critic)]
    loss, data = F.binary_cross_entropy_with_logits, batches(26)
    for _ in range(STEPS):
        real, _ = next(data)
        made = maker(torch.randn(len(real), 6, 1, 1))
        critic.zero_grad()
        loss(critic(real), torch.ones(len(real), 1)).backward()
        loss(critic(made.detach()), torch.zeros(len(real), 1)).backward()
        optimizers[1].step()
        maker.zero_grad()
        loss(critic(made), torch.ones(len(real), 1)).backward()
        optimizers[0].step()


def recurrent():
    model, data = Recurrent(), batches(32)
    optimizer, state = torch.optim.RMSprop(model.parameters(), 1e-3), torch.zeros(2, 32, 16)
    for _ in range(STEPS):
        x, y = next(data)
        scores, state = model(x, state.detach())
        optimizer.zero_grad()
        F.cross_entropy(scores, y).backward()
        optimizer.step()


def two_lines():
    """instep's own functions, which answer as in one process."""
    import instep

    data = TensorDataset(IMAGES, LABELS)
    loader = instep.shard(DataLoader(data, batch_size=10, shuffle=True), bitwise=4)
    model = instep.replicate(cnn(), bitwise=4)
    optimizer = instep.shard(torch.optim.Adam(model.parameters(), 1e-2))
    loss_mean, accuracy, rows = instep.Mean(), instep.Accuracy(), []
    for x, y in loader:
        scores = model(x)
        kept = y != 3
        loss = F.cross_entropy(scores, y, ignore_index=3)
        instep.weight(kept.sum())
        optimizer.zero_grad()
        with instep.no_sync():
            loss.backward()
        optimizer.step()
        loss_mean.update(loss, int(kept.sum()))
        accuracy.update(scores, y)
        rows += instep.gather_rows(y).tolist()
    with instep.single_process_scope() as here:
        if here:
            here.value = instep.world_size
    total = instep.all_reduce(torch.tensor([len(rows)]), "sum").item()
    assert (instep.rank, instep.is_main_process, instep.in_mpi, here.value) == (0, True, False, 1)
    assert total == len(rows) == loader.total_len == len(data)
    assert loss_mean.all_reduce()[1] == sum(y != 3 for y in rows)
    assert accuracy.all_reduce()[-1] == len(data)
    assert instep.on_main_process(len)(rows) == len(data)
    instep.print(f"loss {loss_mean.compute():.9f}, accuracy {accuracy.compute()[0]:.9f}")


def break_on_purpose():
    """Faults that depend on the number of ranks; instep's own modules are loaded already."""
    own = {key.rpartition(".")[2]: module for key, module in sys.modules.items()}
    if fault == "sequential sums":

        def one_by_one(terms):
            totals = [tensor.clone() for tensor in terms[0]]
            for term in terms[1:]:
                torch._foreach_add_(totals, list(term))
            return totals

        own["shard_group"].tree_sum = own["local_sums"].tree_sum = one_by_one
        return
    ranks = own["transport"].get_transport().size if fault else 1
    if fault == "threads":
        torch.set_num_threads(ranks)
    elif fault == "a ring":
        transport = type(own["transport"].get_transport())

        def each_in_a_ring(self, tensors, op):
            for tensor in tensors:
                parts = [
                    list(part.view(-1).tensor_split(ranks)) for part in self.all_gather(tensor)
                ]
                for k, chunk in enumerate(tensor.view(-1).tensor_split(ranks)):
                    chunk.copy_(sum(parts[(k + r) % ranks][k] for r in range(1, ranks + 1)))

        transport.all_reduce_each = each_in_a_ring
    elif fault == "another kernel":
        original = nn.Conv2d.forward
        nn.Conv2d.forward = lambda module, x: original(module, x * (1 + ranks * 1e-6))


break_on_purpose()
TRAININGS = {
    "cnn": lambda: supervised(cnn()),
    "attention": lambda: supervised(Attention()),
    "adversarial": adversarial,
    "recurrent": recurrent,
    "loss inside": lambda: supervised(WithLoss()),
    "experts": lambda: supervised(Experts()),
    "long sum": lambda: supervised(LongSum()),
    "checkpointed": lambda: supervised(Checkpointed()),
    "accumulation": lambda: supervised(cnn(), every=3),
    "bfloat16": lambda: supervised(cnn(), half=True),
    "two lines": two_lines,
    "sparse": sparse,
    "in a list": lambda: supervised(InAList()),
    "large": large,
    "few rows": lambda: supervised(cnn(), size=3),
}
TRAININGS[name]()

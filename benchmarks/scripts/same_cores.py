"""Trainings for one process that know nothing of instep: prints the median milliseconds of a step.

    python same_cores.py MODEL sgd|adam FIRST STEPS [PARTS]

The FIRST steps are not timed. With PARTS a batch has that fraction of its rows: the share of one of
so many ranks. The GNN and PPO ignore it.
"""

import statistics
import sys
from pathlib import Path
from time import perf_counter

import torch
import torch.nn.functional as F
from torch import nn

sys.path.insert(0, str(Path(__file__).parent.parent))
from models import Transformer, mlp, resnet18

name, kind, first, steps = *sys.argv[1:3], int(sys.argv[3]), int(sys.argv[4])
parts = int(sys.argv[5]) if len(sys.argv) > 5 else 1
torch.manual_seed(0)


def optimizer_of(*modules):
    parameters = [p for module in modules for p in module.parameters()]
    if kind == "sgd":
        return torch.optim.SGD(parameters, 0.01, momentum=0.9)
    return torch.optim.Adam(parameters, 1e-3)


def batches_of(inputs, targets, batch):
    loader = torch.utils.data.DataLoader(
        torch.utils.data.TensorDataset(inputs, targets), batch_size=batch // parts, shuffle=True
    )
    while True:
        yield from loader


def supervised(model, inputs, targets, batch, loss_of=F.cross_entropy):
    optimizer, batches = optimizer_of(model), batches_of(inputs, targets, batch)

    def step():
        x, y = next(batches)
        optimizer.zero_grad()
        loss_of(model(x), y).backward()
        optimizer.step()

    return step


def of_mlp():
    return supervised(mlp(), torch.randn(512, 512), torch.randint(0, 1000, (512,)), 64)


def of_small_cnn():
    model = nn.Sequential(
        nn.Conv2d(1, 16, 3), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Dropout(0.2),
        nn.Linear(800, 10),
    )  # fmt: skip
    return supervised(model, torch.randn(1024, 1, 28, 28), torch.randint(0, 10, (1024,)), 64)


def of_cnn():
    def block(before, after):
        convolution = nn.Conv2d(before, after, 3, padding=1, bias=False)
        return nn.Sequential(convolution, nn.BatchNorm2d(after), nn.ReLU(), nn.MaxPool2d(2))

    layers = (block(3, 32), block(32, 64), block(64, 128), block(128, 256))
    model = nn.Sequential(*layers, nn.Flatten(), nn.Linear(1024, 10))
    return supervised(model, torch.randn(512, 3, 32, 32), torch.randint(0, 10, (512,)), 64)


def of_transformer():
    tokens = torch.randint(0, 1000, (256, 65))
    return supervised(Transformer(), tokens[:, :-1], tokens[:, 1:], 32)


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.cells = nn.LSTM(64, 128, 2, batch_first=True)
        self.head = nn.Linear(128, 10)

    def forward(self, x):
        return self.head(self.cells(x)[0][:, -1])


def of_lstm():
    return supervised(Recurrent(), torch.randn(512, 48, 64), torch.randint(0, 10, (512,)), 64)


class GraphLayer(nn.Module):
    def __init__(self, before, after):
        super().__init__()
        self.own, self.others = nn.Linear(before, after), nn.Linear(before, after)

    def forward(self, nodes, source, target):
        messages = self.others(nodes)[source]
        sums = torch.zeros(len(nodes), messages.shape[1]).index_add(0, target, messages)
        return torch.relu(self.own(nodes) + sums)


class Graphs(nn.Module):
    """One graph: its nodes are no batch."""

    def __init__(self):
        super().__init__()
        self.first, self.second = GraphLayer(64, 128), GraphLayer(128, 128)
        self.head = nn.Linear(128, 10)

    def forward(self, nodes, edges):
        nodes = self.first(nodes, edges[0], edges[1])
        return self.head(self.second(nodes, edges[0], edges[1]))


def of_gnn():
    model = Graphs()
    optimizer = optimizer_of(model)
    nodes, edges = torch.randn(2000, 64), torch.randint(0, 2000, (2, 16000))
    labels = torch.randint(0, 10, (2000,))

    def step():
        optimizer.zero_grad()
        F.cross_entropy(model(nodes, edges), labels).backward()
        optimizer.step()

    return step


def convolutions(before, after):
    return nn.Sequential(
        nn.Conv2d(before, after, 3, padding=1), nn.BatchNorm2d(after), nn.ReLU(),
        nn.Conv2d(after, after, 3, padding=1), nn.BatchNorm2d(after), nn.ReLU(),
    )  # fmt: skip


class UNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.down1, self.down2 = convolutions(3, 16), convolutions(16, 32)
        self.middle = convolutions(32, 64)
        self.up2, self.up1 = nn.ConvTranspose2d(64, 32, 2, 2), nn.ConvTranspose2d(32, 16, 2, 2)
        self.across2, self.across1 = convolutions(64, 32), convolutions(32, 16)
        self.head = nn.Conv2d(16, 2, 1)

    def forward(self, x):
        a = self.down1(x)
        b = self.down2(F.max_pool2d(a, 2))
        c = self.middle(F.max_pool2d(b, 2))
        b = self.across2(torch.cat([b, self.up2(c)], 1))
        return self.head(self.across1(torch.cat([a, self.up1(b)], 1)))


def of_unet():
    masks = torch.randint(0, 2, (64, 64, 64))
    return supervised(UNet(), torch.randn(64, 3, 64, 64), masks, 16)


def of_resnet18():
    return supervised(resnet18(10), torch.randn(256, 3, 64, 64), torch.randint(0, 10, (256,)), 32)


def of_dcgan():
    generator = nn.Sequential(
        nn.ConvTranspose2d(64, 128, 4, 1, 0, bias=False), nn.BatchNorm2d(128), nn.ReLU(),
        nn.ConvTranspose2d(128, 64, 4, 2, 1, bias=False), nn.BatchNorm2d(64), nn.ReLU(),
        nn.ConvTranspose2d(64, 32, 4, 2, 1, bias=False), nn.BatchNorm2d(32), nn.ReLU(),
        nn.ConvTranspose2d(32, 3, 4, 2, 1, bias=False), nn.Tanh(),
    )  # fmt: skip
    critic = nn.Sequential(
        nn.Conv2d(3, 32, 4, 2, 1), nn.LeakyReLU(0.2),
        nn.Conv2d(32, 64, 4, 2, 1, bias=False), nn.BatchNorm2d(64), nn.LeakyReLU(0.2),
        nn.Conv2d(64, 128, 4, 2, 1, bias=False), nn.BatchNorm2d(128), nn.LeakyReLU(0.2),
        nn.Conv2d(128, 1, 4), nn.Flatten(),
    )  # fmt: skip
    of_critic, of_generator = optimizer_of(critic), optimizer_of(generator)
    batches = batches_of(torch.randn(256, 3, 32, 32), torch.zeros(256), 32)
    loss_of = F.binary_cross_entropy_with_logits

    def step():
        real, _ = next(batches)
        ones, zeros = torch.ones(len(real), 1), torch.zeros(len(real), 1)
        fake = generator(torch.randn(len(real), 64, 1, 1))
        critic.zero_grad()
        (loss_of(critic(real), ones) + loss_of(critic(fake.detach()), zeros)).backward()
        of_critic.step()
        generator.zero_grad()
        loss_of(critic(fake), ones).backward()
        of_generator.step()

    return step


class Agent(nn.Module):
    def __init__(self):
        super().__init__()
        self.actor, self.critic = (
            nn.Sequential(
                nn.Linear(4, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, outputs)
            )
            for outputs in (2, 1)
        )

    def forward(self, states):
        return self.actor(states), self.critic(states)[:, 0]


def of_ppo():
    """Poles that are balanced, 32 at once; a step is a rollout of 16 and two epochs over it."""
    agent = Agent()
    optimizer = optimizer_of(agent)
    state = torch.zeros(32, 4)

    def move(state, action):
        push = (action.float() * 2 - 1)[:, None] * torch.tensor([0.0, 0.2, 0.0, -0.3])
        drift = torch.stack([state[:, 1], state[:, 1] * 0, state[:, 3], state[:, 2] * 10], 1) * 0.02
        after = state + drift + push + 0.001 * torch.randn_like(state)
        fallen = after[:, 2].abs() > 0.2
        return after * ~fallen[:, None], 1.0 - fallen.float(), fallen

    def step():
        nonlocal state
        rows = []
        for _ in range(16):
            with torch.no_grad():
                logits, value = agent(state)
            choice = torch.distributions.Categorical(logits=logits)
            action = choice.sample()
            after, reward, fallen = move(state, action)
            rows.append((state, action, choice.log_prob(action), value, reward, ~fallen))
            state = after
        states, actions, old, values, rewards, going = map(torch.stack, zip(*rows, strict=True))
        with torch.no_grad():
            following, returns = agent(state)[1], torch.zeros_like(rewards)
        for t in reversed(range(16)):
            following = returns[t] = rewards[t] + 0.99 * following * going[t]
        flat = [each.flatten(0, 1) for each in (states, actions, old, returns, returns - values)]
        for _ in range(2):
            for index in torch.randperm(512).split(128):
                x, a, log_old, r, advantage = (each[index] for each in flat)
                logits, value = agent(x)
                choice = torch.distributions.Categorical(logits=logits)
                ratio = (choice.log_prob(a) - log_old).exp()
                gain = torch.min(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage)
                loss = F.mse_loss(value, r) - gain.mean() - 0.01 * choice.entropy().mean()
                optimizer.zero_grad()
                loss.backward()
                nn.utils.clip_grad_norm_(agent.parameters(), 0.5)
                optimizer.step()

    return step


step = globals()[f"of_{name}"]()
seconds = []
for _ in range(first + steps):
    start = perf_counter()
    step()
    seconds.append(perf_counter() - start)
print(1000 * statistics.median(seconds[first:]))

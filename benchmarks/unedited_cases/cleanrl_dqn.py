"""vwxyzjn/cleanrl: dqn.py, a replay buffer and a target network."""

import random

import gymnasium as gym
import numpy as np
import torch
from torch import nn

random.seed(1)
torch.manual_seed(1)
env = gym.make("CartPole-v1")


def network():
    return nn.Sequential(
        nn.Linear(4, 120), nn.ReLU(), nn.Linear(120, 84), nn.ReLU(), nn.Linear(84, 2)
    )


q, target = network(), network()
target.load_state_dict(q.state_dict())
optimizer = torch.optim.Adam(q.parameters(), 2.5e-4)
memory, (state, _) = [], env.reset(seed=1)
for step in range(400):
    if random.random() < max(0.1, 1 - step / 300):
        action = random.randrange(2)
    else:
        action = int(q(torch.Tensor(state)[None]).argmax(1))
    following, reward, ended, cut, _ = env.step(action)
    memory.append((state, action, reward, following, ended))
    state = env.reset(seed=step)[0] if ended or cut else following
    if step >= 100 and step % 10 == 0:
        s, a, r, n, d = (np.array(c) for c in zip(*random.sample(memory, 64)))
        with torch.no_grad():
            best = target(torch.Tensor(n)).max(1).values
            goal = torch.Tensor(r) + 0.99 * best * (1 - torch.Tensor(d))
        value = q(torch.Tensor(s)).gather(1, torch.tensor(a)[:, None]).squeeze()
        loss = nn.functional.mse_loss(goal, value)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    if step % 100 == 0:
        target.load_state_dict(q.state_dict())
print(f"{loss.item():.4f}")

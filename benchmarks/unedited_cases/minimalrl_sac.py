"""seungeunrho/minimalRL: sac.py, two critics, soft updates, a learned temperature."""

import copy
import random

import gymnasium as gym
import torch
from torch import nn
from torch.distributions import Normal
from torch.nn import functional as F

random.seed(0)
torch.manual_seed(0)


class Policy(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc1, self.mu, self.std = nn.Linear(3, 128), nn.Linear(128, 1), nn.Linear(128, 1)

    def forward(self, x):
        x = F.relu(self.fc1(x))
        normal = Normal(self.mu(x), F.softplus(self.std(x)))
        action = normal.rsample()
        real = torch.tanh(action)
        return real, normal.log_prob(action) - torch.log(1 - real.pow(2) + 1e-7)


class Q(nn.Module):
    def __init__(self):
        super().__init__()
        self.state, self.action = nn.Linear(3, 64), nn.Linear(1, 64)
        self.cat, self.out = nn.Linear(128, 32), nn.Linear(32, 1)

    def forward(self, x, a):
        both = torch.cat([F.relu(self.state(x)), F.relu(self.action(a))], dim=1)
        return self.out(F.relu(self.cat(both)))


env, policy = gym.make("Pendulum-v1"), Policy()
critics = [Q(), Q()]
targets = copy.deepcopy(critics)
log_alpha = torch.tensor(-4.6, requires_grad=True)
actor_opt = torch.optim.Adam(policy.parameters(), 5e-4)
q_opts = [torch.optim.Adam(q.parameters(), 1e-3) for q in critics]
alpha_opt = torch.optim.Adam([log_alpha], 1e-3)
memory, (state, _) = [], env.reset(seed=0)
for step in range(150):
    action, _ = policy(torch.from_numpy(state).float()[None])
    following, reward, ended, cut, _ = env.step([2.0 * action.item()])
    memory.append((state.tolist(), [action.item()], [reward / 10], following.tolist()))
    state = env.reset(seed=step)[0] if ended or cut else following
    if step < 100 or step % 5:
        continue
    s, a, r, n = (torch.tensor(c, dtype=torch.float) for c in zip(*random.sample(memory, 32)))
    with torch.no_grad():
        act, log_prob = policy(n)
        best = torch.min(*(q(n, act) for q in targets))
        goal = r + 0.98 * (best - log_alpha.exp() * log_prob)
    for q, opt in zip(critics, q_opts):
        loss = F.smooth_l1_loss(q(s, a), goal)
        opt.zero_grad()
        loss.mean().backward()
        opt.step()
    act, log_prob = policy(s)
    loss = (log_alpha.exp() * log_prob - torch.min(*(q(s, act) for q in critics))).mean()
    actor_opt.zero_grad()
    loss.backward()
    actor_opt.step()
    alpha_opt.zero_grad()
    (-(log_alpha.exp() * (log_prob + -1.0).detach()).mean()).backward()
    alpha_opt.step()
    for q, target in zip(critics, targets):
        for new, old in zip(q.parameters(), target.parameters()):
            old.data.copy_(old.data * 0.99 + new.data * 0.01)
print(f"{loss.item():.5f} {log_alpha.item():.6f}")

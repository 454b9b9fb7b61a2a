"""pytorch/examples: reinforce, a policy gradient on CartPole."""

from collections import deque

import gymnasium as gym
import torch
from torch import nn
from torch.distributions import Categorical

torch.manual_seed(0)
env = gym.make("CartPole-v1")
policy = nn.Sequential(nn.Linear(4, 128), nn.Dropout(0.6), nn.ReLU(), nn.Linear(128, 2))
optimizer = torch.optim.Adam(policy.parameters(), lr=1e-2)
for episode in range(6):
    state, _ = env.reset(seed=episode)
    saved, rewards, done = [], [], False
    while not done:
        choice = Categorical(logits=policy(torch.from_numpy(state).float().unsqueeze(0)))
        action = choice.sample()
        saved.append(choice.log_prob(action))
        state, reward, ended, truncated, _ = env.step(action.item())
        rewards.append(reward)
        done = ended or truncated
    returns, total = deque(), 0.0
    for reward in rewards[::-1]:
        total = reward + 0.99 * total
        returns.appendleft(total)
    returns = torch.tensor(returns)
    returns = (returns - returns.mean()) / (returns.std() + 1e-8)
    optimizer.zero_grad()
    loss = torch.cat([-p * r for p, r in zip(saved, returns)]).sum()
    loss.backward()
    optimizer.step()
    print(f"episode {episode}: {len(rewards)} steps, {loss.item():.4f}")

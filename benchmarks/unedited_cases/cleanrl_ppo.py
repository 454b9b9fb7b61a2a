"""vwxyzjn/cleanrl: ppo.py, vector environments, clipped objective."""

import gymnasium as gym
import numpy as np
import torch
from torch import nn
from torch.distributions import Categorical

np.random.seed(1)
torch.manual_seed(1)
envs = gym.vector.SyncVectorEnv([lambda: gym.make("CartPole-v1") for _ in range(4)])


def layer(a, b, std=2**0.5):
    linear = nn.Linear(a, b)
    nn.init.orthogonal_(linear.weight, std)
    nn.init.constant_(linear.bias, 0.0)
    return linear


class Agent(nn.Module):
    def __init__(self):
        super().__init__()
        self.critic = nn.Sequential(
            layer(4, 64), nn.Tanh(), layer(64, 64), nn.Tanh(), layer(64, 1, 1.0)
        )
        self.actor = nn.Sequential(
            layer(4, 64), nn.Tanh(), layer(64, 64), nn.Tanh(), layer(64, 2, 0.01)
        )

    def value(self, x):
        return self.critic(x)

    def act(self, x, action=None):
        probs = Categorical(logits=self.actor(x))
        action = probs.sample() if action is None else action
        return action, probs.log_prob(action), probs.entropy(), self.critic(x)


agent = Agent()
optimizer = torch.optim.Adam(agent.parameters(), lr=2.5e-4, eps=1e-5)
state = torch.Tensor(envs.reset(seed=1)[0])
for update in range(4):
    stored = []
    for _ in range(64):
        with torch.no_grad():
            action, logprob, _, value = agent.act(state)
        following, reward, ended, cut, _ = envs.step(action.numpy())
        stored.append(
            (
                state,
                action,
                logprob,
                value.flatten(),
                torch.Tensor(reward),
                torch.Tensor(ended | cut),
            )
        )
        state = torch.Tensor(following)
    obs, actions, logprobs, values, rewards, dones = (torch.stack(c) for c in zip(*stored))
    with torch.no_grad():
        returns, running = torch.zeros_like(rewards), agent.value(state).flatten()
    for t in reversed(range(64)):
        running = rewards[t] + 0.99 * running * (1 - dones[t])
        returns[t] = running
    columns = (obs, actions, logprobs, returns, returns - values)
    flat = [t.reshape(-1, *t.shape[2:]) for t in columns]
    for _ in range(2):
        for rows in np.array_split(np.random.permutation(256), 4):
            o, a, old, ret, adv = (t[rows] for t in flat)
            _, new, entropy, value = agent.act(o, a)
            ratio = (new - old).exp()
            adv = (adv - adv.mean()) / (adv.std() + 1e-8)
            policy = torch.max(-adv * ratio, -adv * ratio.clamp(0.8, 1.2)).mean()
            loss = policy - 0.01 * entropy.mean() + 0.25 * (value.view(-1) - ret).pow(2).mean()
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(agent.parameters(), 0.5)
            optimizer.step()
    print(f"update {update}: {loss.item():.4f}")

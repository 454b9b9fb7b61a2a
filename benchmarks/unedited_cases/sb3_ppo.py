"""stable-baselines3: PPO on CartPole."""

from stable_baselines3 import PPO

model = PPO("MlpPolicy", "CartPole-v1", n_steps=128, batch_size=64, n_epochs=4, seed=0, verbose=0)
model.learn(512)
mean = sum(p.double().sum().item() for p in model.policy.parameters())
print(f"{mean:.4f}")

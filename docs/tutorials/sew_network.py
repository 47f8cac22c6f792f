# %% [markdown]
# # A SEW network, on a GPU if there is one
#
# Spike-element-wise residual blocks (Fang et al., 2021) make deep spiking networks trainable. This page builds a
# network of ready-made blocks, trains it on scikit-learn's handwritten digits, moves the batch norms into the neurons
# after them, and shows the time of each part.

# %%
from __future__ import annotations

import torch
from matplotlib import pyplot
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional as F

from flexsn_nn import LIF, OverTime, functional, fusion, monitor, plot, surrogate
from flexsn_nn.layer import SEWBlock

torch.manual_seed(0)
device = "cuda" if torch.cuda.is_available() else "cpu"
if device == "cpu":
    torch.set_num_threads(1)  # the layers are small, so threads would wait for each other
print("on", device)

# %% [markdown]
# ## Images as currents
#
# A pixel is a current in all four steps, `[T, batch, 1, 8, 8]`. The first layer turns it into spikes.

# %%
digits = load_digits()
images = torch.tensor(digits.images, dtype=torch.float32)[:, None] / 16
targets = torch.tensor(digits.target)
order = torch.randperm(len(images))
training, held_out = order[:1400], order[1400:]


def sequence(chosen):
    return images[chosen].to(device).expand(4, -1, -1, -1, -1), targets[chosen].to(device)


# %% [markdown]
# ## The network
#
# `OverTime` runs layers without a state on all steps at once, as one batch. The argument of a block is a function that
# makes its neurons.


# %%
def lif():
    return LIF(tau=2.0, decay_input=False, surrogate_function=surrogate.ATan(), detach_reset=True)


net = nn.Sequential(
    OverTime(nn.Conv2d(1, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16)),
    lif(),
    SEWBlock(16, 16, lif),
    SEWBlock(16, 32, lif, stride=2),
    OverTime(nn.AdaptiveAvgPool2d(1), nn.Flatten()),
    nn.Linear(32, 10),
).to(device)


def scores(x):
    functional.reset_net(net)
    return net(x).mean(0)


# %% [markdown]
# Neurons can compute the norms before them in their own kernels. The results do not change, and fewer bytes move
# through memory.

# %%
x, _ = sequence(training[:8])
before = scores(x)
print(fusion.fuse_norms(net))
assert torch.allclose(scores(x), before, atol=1e-4)

# %% [markdown]
# ## Training

# %%
optimizer = torch.optim.Adam(net.parameters(), lr=5e-3)
losses = []
for _ in range(2):
    for chosen in training[torch.randperm(len(training))].split(64):
        x, labels = sequence(chosen)
        loss = F.cross_entropy(scores(x), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())

net.eval()
with torch.no_grad(), monitor.RateMonitor(net) as rates:
    x, labels = sequence(held_out)
    accuracy = (scores(x).argmax(1) == labels).float().mean().item()
print(f"held-out accuracy {accuracy:.1%}")
assert accuracy > 0.8

# %%
figure, axes = pyplot.subplots(1, 2, figsize=(10, 3), layout="constrained")
axes[0].plot(losses)
axes[0].set(xlabel="step of training", ylabel="loss")
plot.firing_rates(rates.rates(), ax=axes[1])

# %% [markdown]
# ## Where the time goes
#
# The first line shows which part takes the most time. Below it, the table has a row for each layer.

# %%
x, _ = sequence(training[:64])
report = functional.explain(net.train(), x)
print(report)

# %% [markdown]
# ## Next
#
# [Norms and memory](../norms-and-memory.md) describes the fusion of norms, and [captured steps](../captured-steps.md)
# helps small networks on a GPU. [Performance](../performance.md) shows what was measured.

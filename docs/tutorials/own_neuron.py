# %% [markdown]
# # A neuron of your own, trained
#
# A neuron is one time step, written in PyTorch. This page writes a neuron with two states and two learned parameters,
# shows its responses, and trains a network of such neurons to distinguish frequencies that differ by a third.

# %%
from __future__ import annotations

import torch
from matplotlib import pyplot
from torch import nn
from torch.nn import functional as F

from flexsn_nn import LI, FlexSN, functional, plot, surrogate

torch.manual_seed(0)
torch.set_num_threads(1)  # the layers are small, so threads would wait for each other

# %% [markdown]
# ## One step
#
# A resonator is a pair of states that rotate and decay. It responds to inputs of its own frequency. The step takes an
# input and the states, and returns a spike and the new states. The frequency and the decay are learned numbers for each
# channel.

# %%
spike = surrogate.ATan()


class Resonator(nn.Module):
    def __init__(self, channels):
        super().__init__()
        self.angle = nn.Parameter(torch.linspace(0.1, 0.9, channels))  # radians per step
        self.fading = nn.Parameter(torch.full((channels,), 3.0))

    def forward(self, x, u, v):
        keep = torch.sigmoid(self.fading)
        turned_u = keep * (torch.cos(self.angle) * u - torch.sin(self.angle) * v) + x
        turned_v = keep * (torch.sin(self.angle) * u + torch.cos(self.angle) * v)
        s = spike(turned_v - 1.0)
        return s, turned_u * (1.0 - s), turned_v


# %% [markdown]
# `FlexSN` turns the step into a layer, which maps sequences `[T, batch, channels]` to spikes. Kernels are compiled in
# the first call.

# %%
neuron = FlexSN(Resonator(5), num_inputs=1, num_states=2, num_outputs=1, store_state_seqs=True)
steps = torch.arange(100)
x = 0.3 * torch.sin(0.5 * steps)[:, None, None].expand(-1, 1, 5)  # the frequency of the third channel
spikes = neuron(x)
rates = spikes.mean((0, 1))
print("rates:", [round(rate, 2) for rate in rates.tolist()])
assert rates.argmax() == 2

# %%
figure, axes = pyplot.subplots(1, 2, figsize=(9, 3), layout="constrained", sharey=True)
for axis, channel in zip(axes, (0, 2), strict=True):
    angle = neuron.core.angle[channel].item()
    plot.trace(neuron.state_seqs[1][:, 0, channel], spikes[:, 0, channel], threshold=1.0, ax=axis)
    axis.set_title(f"{angle:.1f} radians a step; the input has 0.5")

# %% [markdown]
# ## Is it what I wrote?
#
# The loop over time in Python is the definition. Compiled kernels return the same spikes.

# %%
compiled = neuron.explain().splitlines()[0]
print(compiled)
neuron.reset()
neuron.backend = "torch"
assert torch.equal(neuron(x), spikes)
neuron.backend = "auto"

# %% [markdown]
# ## Training
#
# The two classes are noisy waves of 0.3 and 0.4 radians per step, which begin at any point of their period. The angles
# start between 0.1 and 0.9, and have a separate learning rate.


# %%
def waves(count):
    labels = torch.randint(2, (count,))
    angles = torch.where(labels == 0, 0.3, 0.4)
    phases = 2 * torch.pi * torch.rand(count)
    clean = torch.sin(angles * steps[:, None] + phases)
    return (clean + 0.3 * torch.randn(clean.shape)).unsqueeze(2), labels


net = nn.Sequential(
    nn.Linear(1, 24),
    FlexSN(Resonator(24), num_inputs=1, num_states=2, num_outputs=1),
    nn.Linear(24, 2),
    LI(tau=10.0),
)
own = list(net[1].parameters())
others = [parameter for parameter in net.parameters() if all(parameter is not mine for mine in own)]
optimizer = torch.optim.Adam([{"params": others}, {"params": own, "lr": 3e-3}], lr=1e-2)

losses = []
for _ in range(120):
    inputs, labels = waves(64)
    functional.reset_net(net)
    loss = F.cross_entropy(5 * net(inputs).mean(0), labels)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    losses.append(loss.item())

# %%
with torch.no_grad():
    inputs, labels = waves(500)
    functional.reset_net(net)
    accuracy = (net(inputs).mean(0).argmax(1) == labels).float().mean().item()
print(f"accuracy {accuracy:.1%}; a guess has 50%")
assert accuracy > 0.85

# %%
figure, axis = pyplot.subplots(figsize=(6, 3), layout="constrained")
axis.plot(losses)
axis.set(xlabel="step of training", ylabel="loss")

# %% [markdown]
# ## From here
#
# Read more about [what a step may contain](../writing-a-neuron.md), [the ready-made neurons](../neurons.md) and, if a
# network learns nothing, [where to look](../my-network-does-not-learn.md).

# %% [markdown]
# # Recurrent layers on audio of different lengths
#
# Words differ in length. This page makes batches of them, runs recurrent layers on each word until its end, and shows
# how to recognise a network that does not learn. The words are synthetic, in the form of the Spiking Heidelberg Digits.
# [examples/datasets/audio.py](../data-audio.md) reads the real files.

# %%
from __future__ import annotations

import torch
from matplotlib import pyplot
from torch import nn
from torch.nn import functional as F

from flexsn_nn import LI, RLIF, data, functional, monitor, plot

torch.manual_seed(0)
torch.set_num_threads(1)  # the layers are small, so threads would wait for each other
CHANNELS, WORDS = 40, 4

# %% [markdown]
# ## Words
#
# In a word, two tones rise or fall over the channels of a cochlea. Words 0 and 1 use the same channels in a different
# order of time, and so do words 2 and 3. A word lasts from 20 to 40 steps.


# %%
def word(label):
    length = int(torch.randint(20, 41, ()))
    time = torch.linspace(0, 1, length)[:, None]
    low, high = ((5.0, 15.0), (22.0, 34.0))[label // 2]
    begin, end = (low, high) if label % 2 == 0 else (high, low)
    centre = begin + (end - begin) * time + torch.randn(())
    rate = 0.7 * torch.exp(-((torch.arange(CHANNELS) - centre) ** 2) / 4)
    return (torch.rand(length, CHANNELS) < rate + 0.01).float(), label


def words(count):
    return [word(int(torch.randint(WORDS, ()))) for _ in range(count)]


figure, axes = pyplot.subplots(1, WORDS, figsize=(10, 2.5), layout="constrained", sharey=True)
for label, axis in enumerate(axes):
    plot.raster(word(label)[0], ax=axis)
    axis.set_title(f"word {label}")

# %% [markdown]
# `pad_sequences` makes a batch: it pads the shorter words with zeros, and returns a tensor with the lengths.

# %%
x, lengths, labels = data.pad_sequences(words(6))
print("batch", list(x.shape), "lengths", lengths.tolist())
assert x.shape == (max(lengths), 6, CHANNELS)

# %% [markdown]
# ## A network
#
# The network has two layers with recurrent weights, and a readout that does not spike. `functional.run` passes the
# lengths to every layer with a state. After the end of a word, such a layer returns zeros and keeps its state.
# `readout` takes the mean over each word.

# %%
net = nn.Sequential(
    nn.Linear(CHANNELS, 48),
    RLIF(48, tau=5.0),
    nn.Linear(48, 48),
    RLIF(48, tau=5.0),
    nn.Linear(48, WORDS),
    LI(tau=10.0, decay_input=False),
)


def scores(x, lengths):
    functional.reset_net(net)
    return data.readout(functional.run(net, x, lengths=lengths), lengths)


longer = torch.cat([x, torch.ones(5, *x.shape[1:])])  # input after the end of the words
assert torch.allclose(scores(longer, lengths), scores(x, lengths), atol=1e-6)

# %% [markdown]
# Before training, check that every layer fires. 0.01 to 0.3 spikes per neuron and step are common.

# %%
with monitor.RateMonitor(net) as rates, torch.no_grad():
    scores(x, lengths)
print(rates)

# %% [markdown]
# ## Training

# %%
optimizer = torch.optim.Adam(net.parameters(), lr=5e-3)
losses = []
for _ in range(40):
    x, lengths, labels = data.pad_sequences(words(32))
    loss = F.cross_entropy(scores(x, lengths), labels)
    optimizer.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(net.parameters(), 1.0)
    optimizer.step()
    losses.append(loss.item())

with torch.no_grad():
    x, lengths, labels = data.pad_sequences(words(200))
    accuracy = (scores(x, lengths).argmax(1) == labels).float().mean().item()
print(f"accuracy {accuracy:.1%}; a guess has 25%")
assert accuracy > 0.85

# %%
figure, axis = pyplot.subplots(figsize=(6, 3), layout="constrained")
axis.plot(losses)
axis.set(xlabel="step of training", ylabel="loss")

# %% [markdown]
# ## From here
#
# [Recurrent networks](../recurrent.md) describes weights, delays, GRUs, and what runs on a GPU.
# [Transforms](../transforms.md) describes lengths and resets in detail. See also [a network that does not
# learn](../my-network-does-not-learn.md).

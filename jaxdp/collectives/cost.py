"""What a schedule costs: its messages and bytes, and its time in a model of the network.

The model: a message of b bytes takes alpha + b beta; combining b received bytes takes b gamma.  A
rank sends and receives at the same time, but `ports` messages at once in each direction (1, if not
said): those of one round queue up, and take as long as the longest, or their sum over `ports`.
A round ends when its slowest rank is done.  So a schedule takes

    T = sum over rounds of  max over ranks of  ( max(sending, receiving) + gamma * reduced bytes )

which is, for m bytes in all, p ranks (a power of two where lg p is written) and one kind of link:

    ring                2 (p - 1) alpha + 2 (p - 1)/p m beta + (p - 1)/p m gamma
    halving-doubling    2 lg p alpha    + 2 (p - 1)/p m beta + (p - 1)/p m gamma
    recursive doubling  lg p (alpha + m beta + m gamma)
    tree                lg p (2 alpha + 2 m beta + m gamma)

In two levels, ranks g * local_size to (g + 1) * local_size - 1 are node g; messages between nodes
take alpha_inter and beta_inter, each rank having its own way out of the node.

Reference: R. Thakur, R. Rabenseifner, W. Gropp, "Optimization of Collective Communication
Operations in MPICH", IJHPCA 19(1), 2005; R. Hockney, "The communication challenge for MPP", 1994.
"""

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass

from jaxdp.collectives.schedule import Round, Schedule


@dataclass(frozen=True)
class Links:
    """The network of the model.

    Attributes:
      alpha: seconds per message.
      beta: seconds per byte sent.
      gamma: seconds per byte reduced.
      local_size: ranks per node, consecutive; None: all ranks are in one.
      alpha_inter, beta_inter: the same between nodes; None: as inside.
      ports: messages that a rank sends, and receives, at once.
    """

    alpha: float
    beta: float
    gamma: float = 0.0
    local_size: int | None = None
    alpha_inter: float | None = None
    beta_inter: float | None = None
    ports: int = 1

    def crosses(self, source: int, destination: int) -> bool:
        """Whether a message goes from one node to another."""
        return _crosses(self.local_size, source, destination)

    def message_s(self, source: int, destination: int, nbytes: int) -> float:
        """The time of one message."""
        alpha, beta = self.alpha, self.beta
        if self.crosses(source, destination):
            alpha = alpha if self.alpha_inter is None else self.alpha_inter
            beta = beta if self.beta_inter is None else self.beta_inter
        return alpha + beta * nbytes


@dataclass(frozen=True)
class Traffic:
    """What a schedule sends.

    Attributes:
      rounds: steps that wait for one another.
      permutes: `lax.ppermute` calls, of which a round may have several.
      messages: messages in all.
      sent_bytes: what each rank sends.
      inter_bytes: what each rank sends to other nodes, a part of `sent_bytes`.
      reduced_bytes: what each rank receives and combines.
    """

    rounds: int
    permutes: int
    messages: int
    sent_bytes: tuple[int, ...]
    inter_bytes: tuple[int, ...]
    reduced_bytes: tuple[int, ...]

    @property
    def max_sent_bytes(self) -> int:
        """What the busiest rank sends."""
        return max(self.sent_bytes)

    @property
    def max_inter_bytes(self) -> int:
        """What the rank that is busiest between nodes sends to other nodes."""
        return max(self.inter_bytes)


def traffic(
    schedule: Schedule, nbytes: int, *, itemsize: int = 4, local_size: int | None = None
) -> Traffic:
    """Counts a schedule's messages and bytes.

    Args:
      schedule: any.
      nbytes: bytes of the whole vector: a rank's input, or, for all_gather, its result.
      itemsize: bytes per element; chunks are whole elements, the last one padded.
      local_size: ranks per node; None: all ranks are in one.
    """
    chunk_bytes = _chunk_bytes(schedule, nbytes, itemsize)
    sent, inter, reduced = ([0] * schedule.n for _ in range(3))
    messages = 0
    for transfers in schedule.rounds:
        for source, destination, count, reduce in _messages(transfers):
            messages += 1
            sent[source] += count * chunk_bytes
            inter[source] += count * chunk_bytes * _crosses(local_size, source, destination)
            reduced[destination] += count * chunk_bytes * reduce
    permutes = sum(len(transfers) for transfers in schedule.rounds)
    return Traffic(
        len(schedule.rounds), permutes, messages, tuple(sent), tuple(inter), tuple(reduced)
    )


def predict_s(schedule: Schedule, nbytes: int, links: Links, *, itemsize: int = 4) -> float:
    """The seconds that a schedule takes in the model.

    Args:
      schedule, nbytes, itemsize: as for `traffic`.
      links: the network.
    """
    chunk_bytes = _chunk_bytes(schedule, nbytes, itemsize)
    return sum(_round_s(transfers, chunk_bytes, links) for transfers in schedule.rounds)


def _round_s(transfers: Round, chunk_bytes: int, links: Links) -> float:
    sending, receiving = defaultdict(list), defaultdict(list)
    reducing: defaultdict[int, float] = defaultdict(float)
    for source, destination, count, reduce in _messages(transfers):
        seconds = links.message_s(source, destination, count * chunk_bytes)
        sending[source].append(seconds)
        receiving[destination].append(seconds)
        reducing[destination] += count * chunk_bytes * links.gamma * reduce

    def queue(times: list[float]) -> float:
        return max(max(times), sum(times) / links.ports) if times else 0.0

    return max(
        max(queue(sending[rank]), queue(receiving[rank])) + reducing[rank]
        for rank in sending.keys() | receiving.keys()
    )


def _messages(transfers: Round) -> Iterator[tuple[int, int, int, bool]]:
    """(source, destination, number of chunks, whether they are reduced) of a round's messages."""
    for transfer in transfers:
        for (source, destination), sent in zip(transfer.pairs, transfer.chunks, strict=True):
            yield source, destination, len(sent), transfer.reduce


def _chunk_bytes(schedule: Schedule, nbytes: int, itemsize: int) -> int:
    return -(-nbytes // (itemsize * schedule.chunks)) * itemsize


def _crosses(local_size: int | None, source: int, destination: int) -> bool:
    return local_size is not None and source // local_size != destination // local_size

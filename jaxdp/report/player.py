"""A schedule to watch: who holds whose contributions, round by round, on a clock of model time.

The page holds the schedules themselves, the values that `execute` runs and `verify` proves; the
browser replays them (`assets/schedule.js`).  Nothing in it is drawn by hand.
"""

import json
from html import escape
from math import inf
from typing import Any

from jaxdp.collectives import Links, Schedule, get_algorithm, make_schedule
from jaxdp.collectives.hierarchical import ranks_per_node
from jaxdp.collectives.schedule import Result
from jaxdp.errors import UserError
from jaxdp.report.layout import layout
from jaxdp.report.page import Page, make_page

PLAYER_ASSETS = ("player.css", "schedule.js", "player.js")
MAX_RANKS = 16  # more cannot be told apart in a picture
DEFAULT_LINKS = Links(alpha=10e-6, beta=1 / 10e9)  # a data centre's Ethernet, roughly

_ITEMSIZE = 4


def animate(
    *algorithms: str | Schedule,
    n: int = 4,
    op: Result = "all_reduce",
    nbytes: int = 1 << 20,
    links: Links = DEFAULT_LINKS,
    **options: int | None,
) -> Page:
    """A page (or a notebook's cell) that plays one algorithm, or several on one clock.

    Args:
      *algorithms: rows of the table that have a schedule, or schedules of one's own.
      n: number of ranks, 2 to 16.
      op: the collective.
      nbytes: bytes of the whole vector, at first: the page has a slider.
      links: the network of the clock, at first; with `local_size`, ranks stand in nodes.
      **options: the algorithms' own, such as `segments` of double_tree.

    Raises:
      UserError: an algorithm has no schedule for this, there are too many ranks, or no data or
        time to be shown.
    """
    names = ", ".join(a if isinstance(a, str) else "a schedule" for a in algorithms)
    title = f"{names}: {op} on {n} ranks"
    body = player_html(*algorithms, n=n, op=op, nbytes=nbytes, links=links, **options)
    height = 760 if len(algorithms) == 1 else 860
    return make_page(
        title, f"<h1>{escape(title)}</h1>\n{body}", assets=PLAYER_ASSETS, height=height
    )


def player_html(
    *algorithms: str | Schedule,
    n: int,
    op: Result = "all_reduce",
    nbytes: int = 1 << 20,
    links: Links = DEFAULT_LINKS,
    **options: int | None,
) -> str:
    """The player as a part of a page that has `PLAYER_ASSETS`.  Arguments as for `animate`."""
    if not algorithms:
        raise UserError("animate: no algorithm was given; expected at least one, such as 'ring'")
    if not 2 <= n <= MAX_RANKS:
        raise UserError(f"a picture of n={n} ranks was asked for; expected 2 to {MAX_RANKS}")
    if links.local_size and n % links.local_size:
        raise UserError(
            f"animate: nodes of {links.local_size} ranks and n={n}; expected a multiple of the "
            "node's size"
        )
    _check_clock(nbytes, links)
    tracks = [_track(algorithm, op, n, links, options) for algorithm in algorithms]
    data = {"nbytes": nbytes, "links": _links(links), "tracks": tracks}
    text = json.dumps(data, separators=(",", ":")).replace("<", "\\u003c")
    label = f"{' and '.join(track['name'] for track in tracks)} on {n} ranks, step by step"
    return (
        f'<section class="player" tabindex="0" aria-label="{escape(label)}">\n'
        f'<script type="application/json">{text}</script>\n'
        "<noscript>The step-through needs JavaScript.</noscript>\n</section>"
    )


def _check_clock(nbytes: int, links: Links) -> None:
    """Raises UserError for data or a network on which no time passes, or backwards."""
    if nbytes < 1:
        raise UserError(f"animate: nbytes={nbytes}; expected at least 1")
    times = {
        name: value
        for name in ("alpha", "beta", "gamma", "alpha_inter", "beta_inter")
        if (value := getattr(links, name)) is not None
    }
    for name, value in times.items():
        if not 0 <= value < inf:
            raise UserError(f"animate: links of {name}={value}; expected 0 or more seconds")
    if not links.alpha and not links.beta:
        raise UserError("animate: links of alpha=0 and beta=0; expected one of them above 0")


def _track(
    algorithm: str | Schedule, op: Result, n: int, links: Links, options: dict[str, Any]
) -> dict[str, Any]:
    """One schedule as `schedule.js` reads it."""
    local_size = links.local_size
    if isinstance(algorithm, Schedule):
        name, about, schedule = "a schedule", "of your own", algorithm
        if schedule.n != n:
            raise UserError(f"animate: a schedule of {schedule.n} ranks; expected one of n={n}")
    else:
        name, about = algorithm, get_algorithm(algorithm).about
        schedule = make_schedule(algorithm, op, n, **options)
        if algorithm == "hierarchical" and local_size is None:
            local_size = ranks_per_node(n, options.get("local_size"))
    where = layout(schedule, local_size)
    return {
        "name": name,
        "about": about,
        "n": schedule.n,
        "chunks": schedule.chunks,
        "itemsize": _ITEMSIZE,
        "rounds": [[transfer._asdict() for transfer in transfers] for transfers in schedule.rounds],
        "starts": [_starts(schedule, rank) for rank in range(schedule.n)],
        "goals": [_bits(schedule.contributors(c)) for c in range(schedule.chunks)],
        "ends": [list(schedule.ends_with(rank)) for rank in range(schedule.n)],
        "places": [[round(x, 1), round(y, 1)] for x, y in where.places],
        "size": round(where.size, 1),
        "aspect": where.aspect,
        "height": round(where.height, 1),
        "nodes": [[round(x, 1) for x in frame] for frame in where.nodes],
    }


def _starts(schedule: Schedule, rank: int) -> list[int]:
    own = schedule.starts_with(rank)
    return [1 << rank if chunk in own else 0 for chunk in range(schedule.chunks)]


def _bits(ranks: range) -> int:
    return sum(1 << rank for rank in ranks)


def _links(links: Links) -> dict[str, Any]:
    return {
        "alpha": links.alpha,
        "beta": links.beta,
        "gamma": links.gamma,
        "ports": links.ports,
        "localSize": links.local_size,
        "alphaInter": links.alpha if links.alpha_inter is None else links.alpha_inter,
        "betaInter": links.beta if links.beta_inter is None else links.beta_inter,
    }

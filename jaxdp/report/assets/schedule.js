// A schedule replayed and priced in the browser: the same rules as jaxdp.collectives.simulate and
// jaxdp.collectives.cost, which the tests hold it to.
//
// A track is what jaxdp.report.player writes: {name, n, chunks, itemsize, rounds, starts, goals, ..},
// a round a list of transfers {pairs: [[source, destination], ..], chunks: [[chunk, ..], ..], reduce}.
"use strict";

const Schedule = {
  // The messages of a round: {source, destination, chunks, reduce}.
  messages(round) {
    return round.flatMap(({ pairs, chunks, reduce }) =>
      pairs.map(([source, destination], i) => ({ source, destination, chunks: chunks[i], reduce })));
  },

  // held[round][rank][chunk]: a bit for each rank whose contribution is in that chunk there.
  replay(track) {
    const held = [track.starts];
    for (const round of track.rounds) {
      const before = held.at(-1);
      const after = before.map((row) => row.slice());
      for (const { source, destination, chunks, reduce } of Schedule.messages(round)) {
        for (const c of chunks) {
          const arrived = before[source][c];
          after[destination][c] = (reduce ? before[destination][c] | arrived : arrived) >>> 0;
        }
      }
      held.push(after);
    }
    return held;
  },

  chunkBytes(track, nbytes) {
    return Math.ceil(nbytes / (track.itemsize * track.chunks)) * track.itemsize;
  },

  // sent[round][rank]: bytes that a rank has sent before a round begins.
  sent(track, nbytes) {
    const size = Schedule.chunkBytes(track, nbytes);
    const sent = [Array(track.n).fill(0)];
    for (const round of track.rounds) {
      const now = sent.at(-1).slice();
      for (const { source, chunks } of Schedule.messages(round)) now[source] += chunks.length * size;
      sent.push(now);
    }
    return sent;
  },

  // The seconds of one round: messages of a rank queue at its ports, the slowest rank ends it.
  roundSeconds(track, round, nbytes, links) {
    const size = Schedule.chunkBytes(track, nbytes);
    const ranks = Array.from({ length: track.n }, () => ({ sending: [], receiving: [], reducing: 0 }));
    for (const { source, destination, chunks, reduce } of Schedule.messages(round)) {
      const local = links.localSize;
      const between = local && Math.floor(source / local) !== Math.floor(destination / local);
      const bytes = chunks.length * size;
      const seconds = between ? links.alphaInter + links.betaInter * bytes : links.alpha + links.beta * bytes;
      ranks[source].sending.push(seconds);
      ranks[destination].receiving.push(seconds);
      if (reduce) ranks[destination].reducing += bytes * links.gamma;
    }
    const queue = (times) =>
      times.length ? Math.max(...times, times.reduce((a, b) => a + b, 0) / links.ports) : 0;
    return Math.max(...ranks.map((r) => Math.max(queue(r.sending), queue(r.receiving)) + r.reducing));
  },

  // ends[round]: when a round ends; the last one is when all is done.
  ends(track, nbytes, links) {
    let total = 0;
    return track.rounds.map((round) => (total += Schedule.roundSeconds(track, round, nbytes, links)));
  },
};

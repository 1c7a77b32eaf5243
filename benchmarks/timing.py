"""How a case is timed: its systems take turns, the ceilings are sampled between the turns, and every system rotates through copies of its data."""

import statistics
import time
from collections import defaultdict
from pathlib import Path

import ceilings as ceilings_module

ROTATION = 1.1  # copies of a system's data together, in last-level caches


def last_level_cache_bytes():
    """Size of the largest cache that Linux names, bytes; 32 MiB when it names none."""
    units = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}
    sizes = [32 << 20]
    for path in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size"):
        text = path.read_text(encoding="utf-8").strip()
        if text[-1:] in units:
            sizes.append(int(text[:-1]) * units[text[-1]])
    return max(sizes)


def copies_for(nbytes):
    """How many copies of nbytes a rotation needs so that none is still in a cache when its turn comes."""
    return max(1, -(-int(ROTATION * last_level_cache_bytes()) // nbytes))


class System:
    """One implementation of a case in one dtype.

    calls: functions, one for each copy of the data, that run until the output can be read and return it as a numpy array (float32).
    seconds: how to time call i; the default is the clock around it. copies: whether the copies exceed the caches. If not, each is used once in
    a turn, and the other systems' data pass in between. threads: of ms_flashmla's pool, None for the run's. pynative: MindSpore's mode for its
    calls, else GRAPH_MODE. pages: what is known of its memory's pages.
    """

    def __init__(self, calls, output, seconds=None, copies=True, threads=None, pages=None, pynative=False):
        self.calls, self.output, self.copies, self.threads, self.pages = calls, output, copies, threads, pages
        self.pynative = pynative
        self._seconds, self._next = seconds, 0

    def step(self):
        """One call on the next copy; seconds."""
        i = self._next
        self._next = (i + 1) % len(self.calls)
        if self._seconds is not None:
            return self._seconds(i)
        start = time.perf_counter()
        self.calls[i]()
        return time.perf_counter() - start


TURN_SECONDS, MAX_CALLS = 0.05, 24
WARM_CALLS = 4  # after a rest threads wake and processors come up; a decode step follows another, and finds them awake
REST_SECONDS = 0.02  # workers of the system before spin on after its last call, on a core that the next one, or a ceiling, needs


def _turn(system, estimate):
    """Seconds of each call of a turn. Short calls come after some that are not counted, as a decode step comes after others."""
    time.sleep(REST_SECONDS)
    count = min(max(int(TURN_SECONDS / estimate), 1), MAX_CALLS)
    warm = 0 if estimate >= TURN_SECONDS else WARM_CALLS if system.copies else 1
    if not system.copies:
        count = max(min(count, len(system.calls) - warm), 1)
    for _ in range(warm):
        system.step()
    return [system.step() for _ in range(count)]


def run(systems, ceilings, seconds, least_rounds, prepare):
    """Times systems ({key: System}) in turns for about `seconds`.

    prepare(system) sets what a system's calls need. Returns ({key: median microseconds}, Sample, Sample of one thread or None): the ceilings
    are the medians of samples taken before, between and after the rounds.
    """
    one_thread = any(system.threads == 1 for system in systems.values())
    samples, taken, estimates = [ceilings.sample(one_thread)], defaultdict(list), {}
    for key, system in systems.items():
        prepare(system)
        for _ in system.calls:  # each copy once: what compiles and what touches its pages for the first time
            system.step()
        estimates[key] = min(system.step() for _ in range(2))
    start = sampled = time.perf_counter()
    rounds = 0
    while rounds < least_rounds or time.perf_counter() - start < seconds:
        for key, system in systems.items():
            prepare(system)
            taken[key] += _turn(system, estimates[key])
            if estimates[key] > 0.1 or time.perf_counter() - sampled > 0.5:
                time.sleep(REST_SECONDS)
                samples.append(ceilings.sample(one_thread))
                sampled = time.perf_counter()
        rounds += 1
    time.sleep(REST_SECONDS)
    samples.append(ceilings.sample(one_thread))
    all_threads, one = zip(*samples)
    return ({key: statistics.median(times) * 1e6 for key, times in taken.items()}, ceilings_module.median(all_threads),
            ceilings_module.median(one) if one_thread else None)

"""What calibrate_host_model.py and host_model_check.py compute from their times: no PyTorch, no GPU. Times in milliseconds."""
import random
import statistics

# Resamples of an interval: its ends then move by a few percent of its width from seed to seed.
RESAMPLES = 2000
SEED = 1


def union_ms(intervals):
    """Length of the union of intervals (start, end)."""
    total, until = 0.0, float("-inf")
    for start, end in sorted(intervals):
        total += max(0.0, end - max(start, until))
        until = max(until, end)
    return total


def shared_out(whole_ms, marked, outside, mark_ms, marks):
    """Host time of a step by group, from steps in which a clock was read at the groups' ends.

    `whole_ms`: a step without marks; `marked`: times by key (pass, group) of steps with them, of which `outside` belongs to no
    group; `mark_ms`: what a mark costs, by pass; `marks`: how often each key is marked in a step.

    A mark costs the same wherever it stands, so that it weighs most on short groups: it is taken from each. What is left is
    scaled to the step without marks, with which the time outside is spread over the groups.
    """
    keys = [key for key in marked[0] if key != outside]
    own = {key: max(0.0, statistics.median(step[key] for step in marked) - mark_ms[key[0]] * marks) for key in keys}
    scale = whole_ms / sum(own.values())
    return {key: ms * scale for key, ms in own.items()}


def quantiles(values, low, high):
    """Two quantiles, linear between the values."""
    values = sorted(values)

    def at(q):
        place = q * (len(values) - 1)
        below = int(place)
        above = min(below + 1, len(values) - 1)
        return values[below] + (values[above] - values[below]) * (place - below)

    return at(low), at(high)


def interval(rounds, figure):
    """Ends of the 95 % interval of `figure`, which takes round numbers: bootstrap over rounds, each drawn whole, so that
    what drifts within a round stays together."""
    rng = random.Random(SEED)
    found = [figure(rng.choices(range(rounds), k=rounds)) for _ in range(RESAMPLES)]
    return quantiles(found, 0.025, 0.975)


def median_of(values, rounds):
    return statistics.median(values[r] for r in rounds)


def spread(values):
    """Largest over smallest."""
    return max(values) / min(values)

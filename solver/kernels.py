"""The planner's inner loops, compiled by numba.

A configuration says how many groups of each option every micro-step has (`counts`, micro-steps x
options) and a target time for it. `decode` places the sequences into a configuration greedily and
`anneal` searches over configurations. Groups of one option and one slowness in one micro-step are
interchangeable: together they are a *pool*, kept in order of load, so that decoding costs about
sequences x pools whatever the number of GPUs.

Shapes: K sequences (longest first), J options (ascending degree), M micro-steps, G groups, P pools.
"""

# numba infers the types of compiled functions.
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

from __future__ import annotations

import numpy as np

from flexray.solver.kernel_cache import kernel

INF = np.inf
# Making and listing a configuration costs about as much as trying this many places.
DECODE = 400
# Looking for room in this many groups costs as much as trying a place.
LOOKS = 16
BULK = 0.85


@kernel
def place(degrees, free, node_of, nodes, largest, order, owner):
    """Gives ranks to groups of descending `degrees`; False if they don't fit.

    Groups larger than any node take free ranks node by node, smallest node first; the others go
    inside the node with the least room that holds them. Powers of two on nodes of a power of two
    therefore lie aligned, and a rank meets at most log2(N) different groups.

    Args:
        free: free ranks of each node, (nodes,); used up.
        order: ranks sorted by node (smallest node first), then fastest first, (N,).
        owner: out: group of each rank, -1 if idle, (N,); ranks that are not -1 on entry but -2
            are taken already.
    """
    for g in range(len(degrees)):
        need = degrees[g]
        where = -1
        if need <= largest:
            for n in range(nodes):
                if free[n] >= need and (where < 0 or free[n] < free[where]):
                    where = n
            if where < 0:
                return False
        elif free.sum() < need:
            return False
        for rank in order:
            if need > 0 and owner[rank] == -1 and (where < 0 or node_of[rank] == where):
                owner[rank] = g
                free[node_of[rank]] -= 1
                need -= 1
    return True


@kernel
def best_fit(sizes, capacity, bin_of):
    """Puts each of `sizes`, (K,), into the fullest bin that holds it; returns the number of bins.

    Tens of thousands of sizes are dealt into hands of ten thousand that are packed one by one: the
    work stays linear. `bin_of`: out, (K,).
    """
    K = len(sizes)
    free = np.empty(K, np.int64)  # of the open bins, ascending
    bins = np.empty(K, np.int64)
    made = 0
    hands = 1 + K // 10_000
    for hand in range(hands):
        n = 0
        for k in range(hand, K, hands):
            i = np.searchsorted(free[:n], sizes[k])
            if i == n:
                free[n], bins[n] = capacity, made
                n += 1
                made += 1
            left, b = free[i] - sizes[k], bins[i]
            while i > 0 and free[i - 1] > left:
                free[i], bins[i] = free[i - 1], bins[i - 1]
                i -= 1
            free[i], bins[i] = left, b
            bin_of[k] = b
    return made


@kernel
def layout(counts, M, J, degrees, machine, group_option, group_step, group_slow):
    """Lists the groups of a configuration, ordered by pool; -1 if a micro-step can't be placed.

    `machine` is (simple, sizes, node_of, order, slowness, largest); on a simple one (equal speeds,
    sizes and degrees that always fit) the number of GPUs is the only limit and is kept by the
    moves. Returns the number of groups.
    """
    simple, sizes, node_of, order, slowness, largest = machine
    G = 0
    for j in range(J):
        for m in range(M):
            for _ in range(counts[m, j]):
                group_option[G] = j
                group_step[G] = m
                group_slow[G] = 1.0
                G += 1
    if simple:
        return G
    owner = np.empty(len(node_of), np.int64)
    for m in range(M):
        listed = 0
        for j in range(J):
            listed += counts[m, j]
        want = np.empty(listed, np.int64)
        ids = np.empty(listed, np.int64)
        i = 0
        for g in range(G - 1, -1, -1):
            if group_step[g] == m:
                want[i] = degrees[group_option[g]]
                ids[i] = g
                i += 1
        # Options ascend by degree, so walking the groups backwards descends.
        owner[:] = -1
        if not place(want, sizes.copy(), node_of, len(sizes), largest, order, owner):
            return -1
        for rank in range(len(owner)):
            if owner[rank] >= 0:
                g = ids[owner[rank]]
                group_slow[g] = max(group_slow[g], slowness[rank])
    return G


@kernel
def decode(
    lengths, time, work, capacity, fixed, micro_step_ms, monotone,
    G, group_option, group_step, group_slow, targets, M, limit, assignment, totals,
):  # fmt: skip
    """Places every sequence, longest first: (ms of the step or inf, places tried).

    A sequence goes where it raises the sum of max(target, largest group time) least, then where it
    costs the least GPU time, then where most room is left: long sequences spread over groups, and
    groups that are full of tokens end at about the same time. Gives up once over `limit`.

    Args:
        time: ms of a sequence in a group of an option, inf where it doesn't fit, (K, J).
        work: time x degree, (K, J). monotone: ascending along J for every sequence.
        assignment: out: group of each sequence, (K,). totals: out: largest group time, (M,).
    """
    K = len(lengths)
    load = np.empty(G)
    tokens = np.zeros(G, np.int64)
    at = np.arange(G)  # position -> group; positions of a pool are contiguous, loads ascend
    start = np.empty(G + 1, np.int64)
    P = 0
    for g in range(G):
        load[g] = fixed[group_option[g]] * group_slow[g]
        if (
            g == 0
            or group_option[g] != group_option[g - 1]
            or group_step[g] != group_step[g - 1]
            or group_slow[g] != group_slow[g - 1]
        ):
            start[P] = g
            P += 1
    start[P] = G
    level = np.empty(M)
    value = 0.0
    for m in range(M):
        level[m] = targets[m]
        totals[m] = 0.0
    tried = 0
    for k in range(K):
        s = lengths[k]
        best, pool = -1, -1
        best_rise, best_work, best_slack = INF, INF, -INF
        for p in range(P):
            g0 = at[start[p]]
            j = group_option[g0]
            t = time[k, j]
            if t == INF:
                continue
            if monotone and best_rise <= 1e-9 and work[k, j] > best_work + 1e-9:
                break
            tried += 1
            m = group_step[g0]
            t *= group_slow[g0]
            room = level[m] - t
            lo, hi = start[p], start[p + 1]
            while lo < hi:  # first position whose load leaves no room
                mid = (lo + hi) // 2
                if load[at[mid]] <= room:
                    lo = mid + 1
                else:
                    hi = mid
            position = -1
            rise, slack = 0.0, 0.0
            for i in range(start[p], lo):
                if tokens[at[i]] + s <= capacity[j]:
                    position = i
                    slack = room - load[at[i]]
                    break
            if position < 0:
                for i in range(lo, start[p + 1]):
                    if tokens[at[i]] + s <= capacity[j]:
                        position = i
                        rise = load[at[i]] - room
                        break
                if position < 0:
                    tried += (start[p + 1] - start[p]) // LOOKS
                    continue
            tried += (position - start[p]) // LOOKS
            w = work[k, j]
            if rise < best_rise - 1e-9 or (
                rise < best_rise + 1e-9
                and (w < best_work - 1e-9 or (w < best_work + 1e-9 and slack > best_slack))
            ):
                best, pool = position, p
                best_rise, best_work, best_slack = rise, w, slack
        if best < 0:
            return INF, tried
        g = at[best]
        j = group_option[g]
        m = group_step[g]
        load[g] += time[k, j] * group_slow[g]
        tokens[g] += s
        assignment[k] = g
        i = best
        while i + 1 < start[pool + 1] and load[at[i + 1]] < load[g]:
            at[i] = at[i + 1]
            i += 1
        at[i] = g
        if load[g] > totals[m]:
            if totals[m] == 0.0:
                value += micro_step_ms
            value += load[g] - totals[m]
            totals[m] = load[g]
            level[m] = max(level[m], load[g])
            if value > limit:
                return INF, tried
    return value, tried


@kernel
def _random(state):
    """Uniform in [0, 1): xorshift64*, so that every machine draws the same."""
    x = state[0]
    x ^= x >> np.uint64(12)
    x ^= x << np.uint64(25)
    x ^= x >> np.uint64(27)
    state[0] = x
    return float((x * np.uint64(2685821657736338717)) >> np.uint64(11)) / 9007199254740992.0


@kernel
def _below(state, n):
    return int(_random(state) * n)


@kernel
def _some(most, state):
    """Mostly 1; now and then up to half of `most`, so that large clusters change quickly."""
    if most < 4 or _random(state) < BULK:
        return 1
    return 1 + _below(state, most // 2)


@kernel
def _fill(counts, degrees, idle, most):
    """Turns idle GPUs into groups of options up to `most`, largest first; returns what is left."""
    for j in range(most, -1, -1):
        while degrees[j] <= idle:
            counts[j] += 1
            idle -= degrees[j]
    return idle


@kernel
def _move(counts, targets, M, J, degrees, N, state):
    """Changes one thing at random in place; returns the new number of micro-steps."""
    r = _random(state)
    m = _below(state, M)
    idle = N
    for j in range(J):
        idle -= counts[m, j] * degrees[j]
    if r < 0.35:  # split groups of some option into smaller ones
        j = 1 + _below(state, J - 1) if J > 1 else 0
        while j < J and (j == 0 or counts[m, j] == 0):
            j += 1
        if j < J:
            some = _some(counts[m, j], state)
            counts[m, j] -= some
            smaller = j - 1 if _random(state) < 0.8 else _below(state, j)
            _fill(counts[m], degrees, idle + some * degrees[j], smaller)
    elif r < 0.7:  # make room for groups of some option, out of smaller ones first
        j = _below(state, J)
        need = degrees[j] * _some(N // degrees[j], state)
        for back in range(1, J + 1):
            i = j - back if j >= back else J - 1 + j - back + 1
            while i != j and idle < need and counts[m, i] > 0:
                counts[m, i] -= 1
                idle += degrees[i]
        while idle >= degrees[j] and need > 0:
            counts[m, j] += 1
            idle -= degrees[j]
            need -= degrees[j]
        _fill(counts[m], degrees, idle, J - 1)
    elif r < 0.97 or len(targets) < M + 1:  # move the target
        spread = 0.05 if _random(state) < 0.8 else 0.3
        # Irwin-Hall: close to normal, and the same on every machine.
        normal = 0.0
        for _ in range(12):
            normal += _random(state)
        change = targets[m] * (normal - 6.0) * spread
        targets[m] = max(0.0, targets[m] + change)
        other = _below(state, M)
        if other != m and _random(state) < 0.5:  # another micro-step makes up for it
            targets[other] = max(0.0, targets[other] - change)
    elif r < 0.985 and len(targets) > M:  # one more micro-step
        counts[M] = counts[m]
        targets[M] = targets[m]
        M += 1
    elif M > 1:  # one fewer
        M -= 1
        counts[m] = counts[M]
        targets[m] = targets[M]
    return M


@kernel
def anneal(
    lengths, time, work, capacity, fixed, micro_step_ms, monotone, degrees, machine,
    counts, targets, M, evaluations, stop_at, heat, seed, assignment,
):  # fmt: skip
    """Searches over configurations from `counts` (most M, J) and `targets` (most M,).

    Both, and `assignment` (K,), hold the best on return. Stops after `evaluations` tried places
    (or one decode), or at a step of `stop_at` ms. Returns (ms of the step, its micro-steps, places
    tried).
    """
    most, J = counts.shape
    N = len(machine[2])
    group_option = np.empty(most * N, np.int64)
    group_step = np.empty(most * N, np.int64)
    group_slow = np.empty(most * N)
    totals = np.empty(most)
    trial = np.empty_like(assignment)
    state = np.array([seed * 2 + 1], np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    here_counts, here_targets, here_M = counts.copy(), targets.copy(), M
    new_counts, new_targets = counts.copy(), targets.copy()
    here = best = INF
    tried = 0
    first = True
    while tried < evaluations and best > stop_at:
        if first:
            new_M, limit = M, INF
        else:
            new_counts[:] = here_counts
            new_targets[:] = here_targets
            new_M = _move(new_counts, new_targets, here_M, J, degrees, N, state)
            cool = (1.0 - tried / evaluations) ** 2
            limit = here - np.log(_random(state) + 1e-300) * (best * heat * cool + 1e-9)
        first = False
        tried += DECODE
        G = layout(new_counts, new_M, J, degrees, machine, group_option, group_step, group_slow)
        if G < 0:
            continue
        value, cost = decode(
            lengths, time, work, capacity, fixed, micro_step_ms, monotone,
            G, group_option, group_step, group_slow, new_targets, new_M, limit, trial, totals,
        )  # fmt: skip
        tried += cost
        if value <= limit and value < INF:
            here, here_M = value, new_M
            here_counts[:] = new_counts
            here_targets[:] = new_targets
            if value < best:
                best, M = value, new_M
                counts[:] = new_counts
                targets[:] = new_targets
                assignment[:] = trial
    return best, M, tried


@kernel
def _top(load, groups, a, load_a, b, load_b):
    """Largest load of a micro-step's groups, with those of groups a and b replaced."""
    top = 0.0
    for g in groups:
        x = load_a if g == a else load_b if g == b else load[g]
        if x > top:
            top = x
    return top


@kernel
def polish(
    lengths, time, capacity, fixed, micro_step_ms, machine, degrees, counts,
    assignment, moves, heat, seed,
):  # fmt: skip
    """Improves an assignment to the groups of a configuration; returns ms of the step.

    A move takes a sequence out of the slowest group of some micro-step into another group, which
    gives shorter ones back: as many tokens of shorter sequences take less time, so that groups full
    of tokens can still even out. Annealed; `assignment`, (K,), holds the best on return.
    """
    M, J = counts.shape
    K, G = len(lengths), counts.sum()
    group_option, group_step = np.empty(G, np.int64), np.empty(G, np.int64)
    group_slow = np.empty(G)
    layout(counts, M, J, degrees, machine, group_option, group_step, group_slow)
    by_step = np.argsort(group_step, kind="mergesort")
    first = np.zeros(M + 1, np.int64)
    for g in range(G):
        first[group_step[g] + 1] += 1
    first = np.cumsum(first)

    load, tokens, count = np.zeros(G), np.zeros(G, np.int64), np.zeros(G, np.int64)
    head = np.full(G, -1, np.int64)  # doubly linked list of each group's sequences
    after, before = np.full(K, -1, np.int64), np.full(K, -1, np.int64)
    for k in range(K - 1, -1, -1):
        g = assignment[k]
        if count[g] == 0:
            load[g] = fixed[group_option[g]] * group_slow[g]
        load[g] += time[k, group_option[g]] * group_slow[g]
        tokens[g] += lengths[k]
        count[g] += 1
        after[k] = head[g]
        if head[g] >= 0:
            before[head[g]] = k
        head[g] = k
    top = np.empty(M)
    value = 0.0
    for m in range(M):
        top[m] = _top(load, by_step[first[m] : first[m + 1]], -1, 0.0, -1, 0.0)
        if top[m] > 0:
            value += top[m] + micro_step_ms

    state = np.array([seed * 2 + 1], np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    best, best_assignment = value, assignment.copy()
    returned = np.empty(K, np.int64)
    for move in range(moves):
        m = _below(state, M)
        g = -1
        for i in range(first[m], first[m + 1]):
            if count[by_step[i]] and load[by_step[i]] >= top[m] - 1e-9:
                g = by_step[i]
        h = _below(state, G)
        if _random(state) < 0.6:
            h = by_step[first[m] + _below(state, first[m + 1] - first[m])]
        if g < 0 or h == g:
            continue
        k = head[g]
        for _ in range(_below(state, count[g])):
            k = after[k]
        jg, jh, mh = group_option[g], group_option[h], group_step[h]
        if time[k, jh] == INF or (count[h] == 0 and top[mh] == 0.0):
            continue
        load_g = load[g] - time[k, jg] * group_slow[g]
        load_h = load[h] + time[k, jh] * group_slow[h]
        if count[h] == 0:
            load_h += fixed[jh] * group_slow[h]
        need = tokens[h] + lengths[k] - capacity[jh]
        room = lengths[k] + capacity[jg] - tokens[g]
        n, moved = 0, 0
        if count[h] > 0 and (need > 0 or _random(state) < 0.8):
            wish = max(need + lengths[k] // 4, int(lengths[k] * (0.3 + _random(state))))
            wish = min(wish, room)
            x = head[h]
            for _ in range(_below(state, count[h])):
                x = after[x]
            for _ in range(count[h]):
                if lengths[x] < lengths[k] and moved + lengths[x] <= wish and time[x, jg] < INF:
                    returned[n] = x
                    n += 1
                    moved += lengths[x]
                    load_g += time[x, jg] * group_slow[g]
                    load_h -= time[x, jh] * group_slow[h]
                x = after[x]
                if x < 0:
                    x = head[h]
        if moved < need:
            continue
        if count[g] == 1 and n == 0:
            load_g = 0.0
        mine = by_step[first[m] : first[m + 1]]
        if m == mh:
            new_m = _top(load, mine, g, load_g, h, load_h)
            new_h = new_m
            change = new_m - top[m]
        else:
            new_m = _top(load, mine, g, load_g, -1, 0.0)
            new_h = _top(load, by_step[first[mh] : first[mh + 1]], h, load_h, -1, 0.0)
            change = new_m - top[m] + new_h - top[mh]
        if new_m == 0.0:
            change -= micro_step_ms
        cool = 1.0 - move / moves
        if change > -np.log(_random(state) + 1e-300) * (best * heat * cool * cool):
            continue
        value += change
        top[m] = new_m
        top[mh] = new_h
        load[g], load[h] = load_g, load_h
        tokens[g] += moved - lengths[k]
        tokens[h] += lengths[k] - moved
        count[g] += n - 1
        count[h] += 1 - n
        returned[n] = k
        for i in range(n + 1):
            x = returned[i]
            source, target = (h, g) if i < n else (g, h)
            if before[x] >= 0:
                after[before[x]] = after[x]
            else:
                head[source] = after[x]
            if after[x] >= 0:
                before[after[x]] = before[x]
            before[x] = -1
            after[x] = head[target]
            if head[target] >= 0:
                before[head[target]] = x
            head[target] = x
            assignment[x] = target
        if value < best - 1e-9:
            best = value
            best_assignment[:] = assignment
    assignment[:] = best_assignment
    return best

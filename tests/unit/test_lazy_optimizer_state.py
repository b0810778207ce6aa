"""An optimizer's whole state, which is read from its owners when a script looks at it."""

import copy
import pickle
import threading
from collections import OrderedDict

import pytest

from kaitian_mpi.errors import CollectiveError
from kaitian_mpi.integrations.shard.lazy_optimizer_state import LazyOptimizerState

WHOLE = {0: {"step": 3}, 1: {"step": 4}}


class Owners:
    """Have a state, and count how often it is read."""

    def __init__(self):
        self.reads = 0

    def collect(self):
        self.reads += 1
        return dict(WHOLE)

    def state(self):
        return LazyOptimizerState.collected_by(self.collect)


LOOKS = {
    "item": lambda state: state[0] == WHOLE[0],
    "get": lambda state: state.get(1) == WHOLE[1],
    "in": lambda state: 1 in state,
    "len": lambda state: len(state) == 2,
    "bool": bool,
    "equal": lambda state: state == WHOLE,
    "unequal": lambda state: (state != {}, state != WHOLE) == (True, False),
    "loop": lambda state: [*state] == [0, 1],
    "reversed": lambda state: [*reversed(state)] == [1, 0],
    "items": lambda state: [*state.items()] == [*WHOLE.items()],
    "values": lambda state: [*state.values()] == [*WHOLE.values()],
    "text": lambda state: str(state) == str(WHOLE),
    "merged": lambda state: state | {2: 5} == {**WHOLE, 2: 5},
    "merged_to": lambda state: {2: 5} | state == {2: 5, **WHOLE},
    "unpacked": lambda state: {**state} == WHOLE,
    "as_dict": lambda state: dict(state) == WHOLE,
    "copied": lambda state: (copy.copy(state), copy.deepcopy(state)) == (WHOLE, WHOLE),
    "copy": lambda state: state.copy() == WHOLE,
    "pickled": lambda state: pickle.loads(pickle.dumps(state)) == OrderedDict(WHOLE),
    "pop": lambda state: state.pop(0) == WHOLE[0] and [*state] == [1],
    "popitem": lambda state: state.popitem() == (1, WHOLE[1]),
    "setdefault": lambda state: state.setdefault(0, {}) == WHOLE[0],
    "by_type": lambda state: type(state)({n: [s] for n, s in state.items()})[0] == [WHOLE[0]],
}
CHANGES = {
    "set": (lambda state: state.__setitem__(0, "new"), {**WHOLE, 0: "new"}),
    "delete": (lambda state: state.__delitem__(0), {1: WHOLE[1]}),
    "update": (lambda state: state.update({0: "new"}), {**WHOLE, 0: "new"}),
    "merge": (lambda state: state.__ior__({2: "new"}), {**WHOLE, 2: "new"}),
    "clear": (lambda state: state.clear(), {}),
}


@pytest.mark.parametrize("name", LOOKS)
def test_a_first_look_of_any_kind_reads_the_state(name):
    owners = Owners()
    state = owners.state()
    assert owners.reads == 0
    assert LOOKS[name](state)
    assert owners.reads == 1


@pytest.mark.parametrize("name", CHANGES)
def test_a_change_before_the_first_look_is_kept(name):
    owners = Owners()
    change, expected = CHANGES[name]
    state = owners.state()
    change(state)
    assert (state, owners.reads) == (expected, 1)


def test_a_state_that_could_not_be_read_is_read_again():
    collects = [CollectiveError("a rank is lost"), dict(WHOLE)]

    def collect():
        result = collects.pop(0)
        if isinstance(result, Exception):
            raise result
        return result

    state = LazyOptimizerState.collected_by(collect)
    with pytest.raises(CollectiveError):
        len(state)
    assert state == WHOLE


def test_a_second_thread_waits_for_the_first_ones_read():
    is_reading, may_end = threading.Event(), threading.Event()
    reads = []

    def collect():
        reads.append(threading.current_thread())
        is_reading.set()
        assert may_end.wait(60)
        return dict(WHOLE)

    state = LazyOptimizerState.collected_by(collect)
    sizes = []
    threads = [threading.Thread(target=lambda: sizes.append(len(state))) for _ in range(2)]
    threads[0].start()
    assert is_reading.wait(60)
    threads[1].start()
    threads[1].join(0.05)
    may_end.set()
    for thread in threads:
        thread.join()
    assert (sizes, reads) == ([2, 2], threads[:1])

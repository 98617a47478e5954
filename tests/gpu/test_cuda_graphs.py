"""Launches that are captured when they come again, states that are made so, and metadata that wait for no copy."""

from types import SimpleNamespace

import pytest
import torch

from daemons.cuda_graphs import RepeatedLaunches
from daemons.graphs import STAGED, Staging
from daemons.kv.state_updates import StateUpdates
from daemons.ops import delta_rule
from daemons.ops.triton_operations import TritonOperations
from lucevisor.model.spec import update_width

pytestmark = pytest.mark.gpu
DEVICE = torch.device("cuda:0")
N_KEY, N_VALUE, DIM = 2, 4, 128
LAYERS, STATES, ROWS = 3, 4, 9


class Counted:
    """Adds 1 to a number on the device, and counts how often the host was asked to."""

    def __init__(self):
        self.x, self.n = torch.zeros(1, device=DEVICE), 0

    def __call__(self):
        self.n += 1
        self.x.add_(1)


def run(launches, key, work):
    if not launches.replay(key):
        launches.launch(key, work)


def test_launches_of_the_second_time_are_captured():
    launches, work = RepeatedLaunches(DEVICE, "numbers are added"), Counted()
    for _ in range(5):
        run(launches, "a", work)
    assert (work.n, work.x.item()) == (2, 5)


@pytest.mark.parametrize("captured", [False, True])
def test_states_are_made(captured):
    """As by the torch form, in place and elsewhere, with the windows of a row, also when the rows have changed."""
    torch.manual_seed(1)
    operations = TritonOperations()
    matrices = torch.randn(LAYERS, STATES, N_VALUE, DIM, DIM, device=DEVICE)
    made = StateUpdates(DEVICE, operations.apply_updates)
    updates = made.allocate(LAYERS, ROWS, update_width(N_KEY, N_VALUE, DIM), "the test's states")
    made.add(matrices, updates, range(LAYERS))
    whole = torch.randn(LAYERS, ROWS, 3, 64, device=DEVICE)
    made.add_windows([whole])
    for case in [(1, [1, 6, 4], 1, 4), (1, [1], 2, None), (1, [1, 6, 4, 8, 5], 1, 5)] * (3 if captured else 1):
        source, rows, target, window = case
        for i in range(LAYERS):
            made.of_layer(i).normal_().mul_(0.1)
        updates = torch.stack([made.of_layer(i) for i in range(LAYERS)])
        wanted, windows = matrices.clone(), whole.clone()
        delta_rule.apply_updates(wanted, updates, source, torch.tensor(rows, device=DEVICE), target)
        if window is not None:
            windows[:, target] = windows[:, window]
        made.apply(*case)
        torch.testing.assert_close(matrices, wanted, rtol=1e-5, atol=1e-5)
        assert torch.equal(whole, windows)
        matrices.normal_()
    assert any(graph for graph, _ in made.launches._kept.values()) == captured


def test_metadata_of_queued_steps_are_their_own():
    staging, n = Staging(), 3 * STAGED
    targets = [torch.zeros(5, dtype=torch.int64, device=DEVICE) for _ in range(n)]
    torch.cuda._sleep(50_000_000)  # the device is busy meanwhile
    for i, target in enumerate(targets):
        layout = SimpleNamespace(numbers=[i] * 5, fill=lambda metadata: metadata[:1].fill_(-1))
        staging.refill(target, layout)
    assert [target.tolist() for target in targets] == [[-1, *[i] * 4] for i in range(n)]

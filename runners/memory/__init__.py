"""Every byte count that is derived: weights, KV, hand-off buffers, workspaces and conversion peaks, per rank.

`plan_memory` turns a JobSpec into tables, one a device, whose rows say where each figure comes from.
"""

from runners.memory.plan import MemoryPlan, Registration, host_bytes, plan_memory
from runners.memory.shape import MemoryUnknown
from runners.memory.tables import Budget, Table, Term

__all__ = ["Budget", "MemoryPlan", "MemoryUnknown", "Registration", "Table", "Term", "host_bytes", "plan_memory"]

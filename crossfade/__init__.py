"""Crossfade makes communication disappear under computation in distributed PyTorch programs, and says what it did.

import crossfade as cf

step = cf.compile_step(model, loss_fn, optimizer, mesh)
loss = step(inputs, targets)
step.report.show()
"""

from crossfade.check.compatible import check_compatible
from crossfade.compile.gradients import Gradients, compile_gradients
from crossfade.compile.phases import Phase, Phases
from crossfade.compile.pipeline import Optimized, optimize
from crossfade.compile.sharding import Sharded, shard
from crossfade.compile.simplify_exported import Simplified, simplify
from crossfade.compile.step import Step
from crossfade.compile.training_phases import TRAINING, StepCompilation
from crossfade.cost.machine import Machine
from crossfade.errors import (
    BatchError,
    CaptureError,
    CrossfadeError,
    MachineError,
    MemoryLimitError,
    MeshError,
    ModelError,
    NotYetError,
    OptimizerError,
    PassError,
    PlanDriftError,
    PlanError,
    RankFailedError,
    RankMismatchError,
    RewriteError,
    StateError,
    StrictError,
    TextError,
    VerifyError,
)
from crossfade.forecast.simulate import simulate
from crossfade.graph.passes import Numerics, Outcome, Pass, PassResult, Verdict, run_passes
from crossfade.graph.pipelines import Pipeline
from crossfade.graph.program import Program
from crossfade.integrations.torch_compile import reports
from crossfade.ranks.local import Ranks
from crossfade.report.expect import Expect
from crossfade.report.report import Report
from crossfade.search.auto import compile_step
from crossfade.search.find_plan import find_plan
from crossfade.search.plan_found import FoundPlan
from crossfade.shard.tensor.plan import Fused, Plan

__version__ = "0.1.0"

__all__ = [
    "BatchError",
    "CaptureError",
    "CrossfadeError",
    "Expect",
    "FoundPlan",
    "Fused",
    "Gradients",
    "Machine",
    "MachineError",
    "MemoryLimitError",
    "MeshError",
    "ModelError",
    "NotYetError",
    "Numerics",
    "Optimized",
    "OptimizerError",
    "Outcome",
    "Pass",
    "PassError",
    "PassResult",
    "Phase",
    "Phases",
    "Pipeline",
    "Plan",
    "PlanDriftError",
    "PlanError",
    "Program",
    "RankFailedError",
    "RankMismatchError",
    "Ranks",
    "Report",
    "RewriteError",
    "Sharded",
    "Simplified",
    "StateError",
    "Step",
    "StepCompilation",
    "StrictError",
    "TRAINING",
    "TextError",
    "Verdict",
    "VerifyError",
    "check_compatible",
    "compile_gradients",
    "compile_step",
    "find_plan",
    "optimize",
    "reports",
    "run_passes",
    "shard",
    "simplify",
    "simulate",
]

"""The decoder's MLPs: one dense, or a router with routed and shared experts (DeepSeekMoE)."""

from functools import cached_property

import torch
from torch import Tensor, nn

from kernels.activation import silu_mul
from kernels.moe import moe_experts
from kernels.router import route
from kernels.tiles import ExpertsPlan, invariant_plan, plan_for
from model.config import LanguageConfig
from model.linear import Linear


class MLP(nn.Module):
    """down(silu(gate x) * up x), the gate's rows before the up's in one matrix."""

    def __init__(self, hidden_size: int, intermediate_size: int) -> None:
        super().__init__()
        self.gate_up_proj = Linear(hidden_size, 2 * intermediate_size, bias=False)
        self.down_proj = Linear(intermediate_size, hidden_size, bias=False)

    def forward(self, hidden_states: Tensor) -> Tensor:
        output: Tensor = self.down_proj(silu_mul(self.gate_up_proj(hidden_states)))
        return output


class MixtureOfExperts(nn.Module):
    """Routed experts and, as the last ones of the same stack, shared experts that every token takes with weight 1."""

    def __init__(self, config: LanguageConfig) -> None:
        super().__init__()
        num_experts = config.num_routed_experts + config.num_shared_experts
        self.router = Router(config)
        self.experts = Experts(num_experts, config.hidden_size, config.moe_intermediate_size)
        self._num_routed = config.num_routed_experts

    def shared_weights(self) -> list[Tensor]:
        """The shared experts' parts of gate_up_weight and down_weight."""
        return [self.experts.gate_up_weight[self._num_routed :], self.experts.down_weight[self._num_routed :]]

    def forward(self, hidden_states: Tensor) -> Tensor:
        """[T, hidden_size] to the same."""
        expert_ids, weights = self.router(hidden_states)
        experts = self.experts
        return moe_experts(
            hidden_states, experts.gate_up_weight, experts.down_weight, expert_ids, weights, experts.plan
        )


class Router(nn.Module):
    """Scores every routed expert; its weights stay float32 whatever the model's dtype."""

    def __init__(self, config: LanguageConfig) -> None:
        super().__init__()
        self.config = config
        self.batch_invariant = False
        self.weight = nn.Parameter(torch.empty(config.num_routed_experts, config.hidden_size, dtype=torch.float32))
        bias = torch.empty(config.num_routed_experts, dtype=torch.float32) if config.topk_method == "noaux_tc" else None
        self.e_score_correction_bias = None if bias is None else nn.Parameter(bias)

    def forward(self, hidden_states: Tensor) -> tuple[Tensor, Tensor]:
        """Experts int64 [T, k + shared] and their weights float32 [T, k + shared] of hidden_states [T, hidden_size].

        The shared experts come last, numbered after the routed ones, with weight 1.
        """
        config = self.config
        assert config.topk_method is not None and config.num_experts_per_tok is not None
        return route(
            hidden_states,
            self.weight,
            self.e_score_correction_bias,
            topk=config.num_experts_per_tok,
            method=config.topk_method,
            scoring=config.scoring_func,
            normalize=config.norm_topk_prob,
            scaling_factor=config.routed_scaling_factor,
            num_groups=config.n_group or 1,
            topk_groups=config.topk_group or 1,
            num_shared=config.num_shared_experts,
            batch_invariant=self.batch_invariant,
        )


class Experts(nn.Module):
    """The weights of E experts of width I: gate_up_weight [E, 2I, H], gate rows first, and down_weight [E, H, I]."""

    def __init__(self, num_experts: int, hidden_size: int, intermediate_size: int) -> None:
        super().__init__()
        self.batch_invariant = False
        self.gate_up_weight = nn.Parameter(torch.empty(num_experts, 2 * intermediate_size, hidden_size))
        self.down_weight = nn.Parameter(torch.empty(num_experts, hidden_size, intermediate_size))

    @cached_property
    def plan(self) -> ExpertsPlan:
        """How the kernels are cut for these weights on their device. Raises TilesError for an unusable table."""
        return invariant_plan(self.gate_up_weight.dtype) if self.batch_invariant else plan_for(self.gate_up_weight)

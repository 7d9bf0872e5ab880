"""Every published system has an entry test: what a user types, and an independent reference."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

pytestmark = pytest.mark.fast
TESTS = Path(__file__).parents[1]

ENTRIES = {
    "Tutel": ["systems/test_layers.py::test_each_system_computes_every_token_by_its_experts",
              "systems/test_layers.py::test_measured_layouts_change_between_calls_and_the_results_"
              "do_not",
              "systems/test_top_k_at.py", "systems/test_input_dropout.py"],
    "HetuMoE": ["systems/test_layers.py::test_one_rank_of_each_node_sends_to_the_other_nodes",
                "systems/test_hash_vocabulary.py"],
    "FasterMoE": ["systems/test_layers.py::test_a_shadowed_expert_computes_where_its_tokens_are"],
    "PPMoE": ["systems/test_layers.py::test_each_system_computes_every_token_by_its_experts",
              "exactness/test_shared_tokens.py"],
    "ForestColl": ["systems/test_layers.py::test_the_planned_trees_reach_the_bound_of_the_worst_"
                   "cut"],
    "Parm": ["systems/test_parm.py"],
    "TA-MoE": ["systems/test_ta_moe.py"],
    "EPS-MoE": ["systems/test_eps_moe.py"],
    "ATOM": ["systems/test_atom.py", "systems/test_atom_fairseq.py"],
    "SWARM": ["systems/test_swarm.py"],
    "AlpaComm": ["systems/test_alpacomm.py"],
    "TeraPipe": ["hosts/megatron/test_megatron_terapipe.py::test_slices_equal_1f1b_and_one_stage",
                 "planner/test_pipeline.py::test_the_cut_is_the_best_of_all"],
    "Pre-gated MoE": ["exactness/test_pregate.py::test_equals_a_dense_computation"],
    "KARMA": ["hosts/fairseq/test_activations.py::test_the_log_is_that_of_keeping",
              "planner/test_activation_plan.py::test_the_plan_is_the_best_of_all"],
    "ByzShield": ["hosts/fairseq/test_training.py::test_ranks_that_send_wrong_gradients_are_"
                  "outvoted",
                  "hosts/fairseq/test_training.py::test_votes_of_expert_parallel_groups",
                  "planner/test_vote_assignments.py::test_the_search_is_exhaustive"],
    "CMCL": ["training/ensembles/test_cmcl.py::test_assignment_is_the_best_of_all_subsets",
             "hosts/fairseq/test_ensemble.py::test_trains_from_the_command_line"],
    "SwinV2-MoE": ["systems/test_vision.py"],
}


@pytest.mark.parametrize("system", ENTRIES)
def test_entry_tests_exist(system: str) -> None:
    for entry in ENTRIES[system]:
        file, _, name = entry.partition("::")
        functions = {node.name for node in ast.parse((TESTS / file).read_text()).body
                     if isinstance(node, ast.FunctionDef) and node.name.startswith("test")}
        assert functions and (not name or name in functions), entry


def test_each_file_of_this_folder_is_an_entry() -> None:
    listed = {entry.partition("::")[0] for entries in ENTRIES.values() for entry in entries}
    apart = {"test_entries.py", "test_one_file.py", "test_apex.py"}  # of all systems, of none
    here = {path.name for path in Path(__file__).parent.glob("test_*.py")}
    assert here - apart == {entry[len("systems/"):] for entry in listed if "systems/" in entry}

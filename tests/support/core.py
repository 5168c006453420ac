"""The tests with real processes that run each time: one for each mechanism. `make test-all` runs the others too."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

CORE: Final[Mapping[str, str]] = MappingProxyType(
    {
        "two pods train": "test_launcher_training.py::test_two_pods_train_plain_script",
        "secondary failure": "test_launcher_training.py::test_failed_pod_reports_cause_and_peer_fails_secondarily",
        "restart in the same pods": "test_launcher_training.py::test_worker_failing_once_is_restarted_in_place",
        "replaced pod": "test_launcher_training.py::test_training_continues_with_replacement_of_killed_master",
        "stop of a peer": "test_launcher_evictions.py::test_eviction_restarts_peers_without_counting[break-1]",
        "stop by a signal": "test_launcher_ends.py::test_sigterm_lets_workers_save_and_reports_preempted",
        "end of the launcher": "test_launcher_ends.py::test_sigkill_of_the_launcher_leaves_no_process",
        "slow end": "test_launcher_causes.py::test_slow_end_of_failed_rank_is_counted_as_root_cause[exception]",
        "hang": "test_launcher_hangs.py::test_sleeping_rank_is_root_cause_and_workers_restart_in_place",
        "collectives": "test_launcher_hangs.py::test_hang_names_rank_that_did_not_arrive_and_collective_of_its_peer[2]",
        "process groups": "test_launcher_groups.py::test_ranks_that_end_report_whether_they_trained_together",
        "elastic size": "test_launcher_elastic.py::test_a_job_grows_shrinks_and_loses_a_pod_without_losing_steps",
        "spare pod": "test_launcher_spares.py::test_spare_replaces_lost_pod_and_successor_is_on_standby",
        "preflight": "test_launcher_preflight.py::test_preflight_measures_all_reduce_and_page_has_results",
        "rank in a new interpreter": "test_launcher_worker.py::test_script_behaves_as_in_plain_interpreter[raises]",
        "error file": "test_launcher_worker.py::test_exception_writes_error_file",
        "forked rank": "test_launcher_warm_start.py::test_ranks_are_forked_at_start_and_restarts",
        "fresh rank": "test_forked_rank.py::test_forked_rank_equals_fresh_interpreter_at_start_and_restart",
        "forked script": "test_launcher_warm_start.py::test_forked_script_behaves_as_in_plain_interpreter[own state]",
        "counted steps": "test_launcher_torch_features.py::test_steps_of_unchanged_script_are_on_page",
        "signed rendezvous": "test_rendezvous_attack.py::test_pickle_in_store_is_not_executed_and_disturbs_no_job",
        "copies in memory": "test_memory_pods.py::test_rank_killed_during_a_copy_costs_no_completed_step",
        "checkpoints in a store": "test_checkpoint_url.py::test_replacement_of_killed_pod_resumes_from_store",
        "local cluster": "test_run_digits.py::test_sample_trains_and_writes_status_metrics_report_and_logs",
        "hidden exit code": "test_run_processes.py::test_exit_code_that_hides_a_failure_is_reported",
        "Ctrl-C": "test_run_processes.py::test_ctrl_c_lets_workers_save_and_ends_all_processes",
        "inputs": "test_run_inputs.py::test_interrupted_download_is_complete_at_script_start_and_in_next_run",
        "same decisions": "test_same_decision.py::test_failed_attempt_on_local_cluster_has_expected_history",
        "exact gradients": "test_trainer_collectives.py::test_two_ranks_batch_norm_is_that_of_whole_batch",
        "exact resume": "test_trainer_exactness.py::test_killed_run_resumes_to_bitwise_same_state",
        "systems of the documents": "test_trainer_systems.py::test_documents_system_trains_on_two_ranks",
        "check of a script": "test_check.py::test_fault_is_reported_with_its_line",
        "check of a restart": "test_scripts.py::test_fault_is_reported_alone[scheduler not saved]",
        "fault of a feature": "test_launcher_services.py::test_pod_trains_on_if_each_hook_of_a_feature_fails[raises]",
        "edited code in held pods": "test_launcher_dev.py::test_edited_code_runs_in_the_same_pods",
        "objects of a script": "test_counted_calls.py::test_objects_are_called_as_often_with_hooks_as_without",
        "planted failure": "test_answers.py::test_planted_failure_has_its_answer[a batch of one sample]",
        "mistake of a user": "test_trainer_endings.py::test_user_error_on_one_rank_ends_all_and_names_rank",
    }
)
"""By mechanism: a test's file and name, with or without its parameters."""
_NAMES: Final = frozenset(CORE.values())


def is_core(nodeid: str) -> bool:
    """Return whether the test of a node id runs each time."""
    name = nodeid.rpartition("/")[2]
    return name in _NAMES or name.partition("[")[0] in _NAMES

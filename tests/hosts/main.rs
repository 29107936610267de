//! Whole targets against this crate's own hosts, in one process: one suite, generic over the provider.
//!
//! Each scenario is a function over a [`rig::Rig`], which makes the provider that target and hosts share; `suite!` lists the
//! scenarios once per rig. `FIELD-REPORTS.md` beside this directory says which reported fault of other targets each of them
//! stands for. Our own host is not the only judge: what it passes, the kernel's host must pass too (`tests/vm`).

mod rig;

mod latency;
mod live;
mod load;
mod plan_windows;
mod plans;
mod raw_access;
mod raw_admin;
mod raw_auth;
mod raw_blocks;
mod raw_capsule;
mod raw_connect;
mod raw_discovery;
mod raw_ends;
mod raw_fused;
mod raw_limits;
mod raw_paths;
mod raw_reserve;
mod raw_rewrite;
mod raw_shares;
mod raw_told;
mod raw_transfer;
mod raw_zone_runs;
mod raw_zoned;
mod skipped;

/// A `#[test]` per scenario, on one rig.
macro_rules! suite {
    ($rig:ty: $($module:ident { $($name:ident),+ $(,)? })+) => {
        $(mod $module { $(#[test] fn $name() { crate::$module::$name::<$rig>(); })+ })+
    };
}

/// The scenarios that every provider has to pass.
macro_rules! every_scenario {
    ($rig:ty) => {
        suite! { $rig:
            raw_connect {
                malformed_private_data_are_rejected_with_the_status_that_says_why,
                sizes_have_both_sides_and_reserved_bytes_are_ignored,
                read_depth_zero_is_rejected_and_nobody_listening_is_told,
                connect_command_names_the_field_that_is_wrong,
                io_connect_must_agree_with_its_admin_queue,
                io_connect_to_a_controller_that_is_gone_names_its_id,
                only_connect_may_come_first_and_only_once,
                odd_host_names_may_connect,
                of_two_connect_commands_at_once_one_counts,
                connect_data_in_the_capsule_work,
                two_hundred_connections_at_once_and_nothing_is_left,
            }
            raw_capsule {
                in_capsule_descriptors_are_checked_against_what_arrived,
                in_capsule_offset_carries_the_right_bytes,
                descriptor_types_are_checked_on_every_command,
                descriptor_lists_are_checked,
                short_capsule_ends_its_queue_alone,
                more_commands_than_entries_end_their_queue_alone,
                flags_that_fabrics_forbids_are_refused,
                block_ranges_and_transfer_size_have_both_sides,
                ranges_of_dataset_management_are_checked_before_any_effect,
                random_capsules_are_answered_or_end_their_queue_alone,
            }
            raw_shares {
                receives_of_ended_io_queues_serve_admin_queues,
                commands_of_a_stalled_disk_leave_buffers_to_other_hosts,
            }
            raw_transfer {
                wrong_key_ends_its_queue_and_writes_nothing,
                key_is_invalidated_when_and_only_when_asked,
                reads_never_exceed_the_depth_that_the_host_gave,
                sixteen_descriptors_carry_a_megabyte,
                every_in_capsule_size_works,
                small_capsules_carry_one_descriptor,
            }
            raw_rewrite {
                data_rewritten_under_way_are_read_once,
                ranges_rewritten_under_way_are_checked_and_used_as_one_copy,
            }
            raw_admin {
                log_pages_serve_any_window_and_refuse_bad_offsets,
                every_feature_and_identify_is_answered,
                event_requests_have_a_limit_and_aborts_are_answered,
                properties_are_readable_and_a_reset_aborts_nothing_twice,
                shutdown_is_complete_when_the_caches_are_flushed,
                shutdown_stays_incomplete_when_the_flush_fails,
                discovery_controller_refuses_quietly,
            }
            raw_access {
                a_namespace_is_not_there_for_hosts_that_may_not_see_it,
                a_mask_waits_for_commands_in_progress,
                controllers_have_limits_and_duplicates_a_policy,
                a_host_that_takes_its_own_place_waits_for_its_old_writes,
                a_subsystem_reset_disconnects_its_hosts_and_no_others,
                retry_delays_come_with_what_passes,
                limits_hold_while_they_are_set,
                commands_held_back_end_like_any_others,
            }
            raw_discovery {
                referrals_are_told_to_those_they_are_for,
                a_discovery_name_of_its_own_is_told_and_answered,
                each_host_reads_of_what_it_may_use,
            }
            raw_blocks {
                copy_moves_ranges_in_their_order_up_to_its_limits,
                copy_that_fails_in_the_middle_names_the_range,
                verify_reads_and_tells_of_the_medium,
                limits_that_identify_tells_are_enforced,
                write_zeroes_with_deallocate_reads_as_zeroes,
                write_protection_set_by_one_host_holds_for_all,
                hosts_write_protect_only_where_that_is_kept,
                write_protection_waits_for_writes_in_progress,
            }
            raw_reserve {
                every_reservation_type_keeps_out_whom_it_should,
                reservations_are_of_hosts_and_outlive_their_connections,
                two_hundred_hosts_register_and_one_preempts_them_all,
                refused_reservation_commands_change_nothing,
                preempt_and_abort_ends_what_the_other_host_has_in_progress,
                preempt_and_abort_waits_for_a_disk_that_cannot_cancel,
                preempt_and_abort_in_random_disorder_lets_no_late_write_land,
                preempted_hosts_are_notified_and_read_why,
                reservations_and_write_protection_survive_a_new_start,
            }
            raw_auth {
                hosts_prove_themselves_on_every_queue,
                nothing_is_taken_before_authentication,
                wrong_secrets_end_their_queue_alone,
                secrets_change_and_hosts_authenticate_again_under_io,
                large_groups_delay_nobody_else,
                who_has_not_proven_itself_takes_no_place,
                ended_associations_leave_no_work_behind,
            }
            raw_paths {
                ana_states_hold_for_their_listener_and_are_told,
                ana_state_waits_for_commands_in_progress,
                ana_state_waits_for_deallocation_and_no_longer,
                namespaces_move_between_ana_groups,
                io_follows_the_ana_states_without_an_error,
            }
            raw_zoned {
                zones_are_told_to_hosts_that_know_them,
                writes_follow_the_write_pointer,
                appends_from_many_sides_land_once_each,
                zones_change_their_states_as_hosts_ask,
                reports_are_cut_where_the_host_says,
                write_pointers_are_right_after_failed_writes,
                appends_of_ended_queues_leave_the_zone_to_others,
                reservations_take_zone_commands_for_what_they_are,
                aborted_while_the_storage_is_asked_is_not_run,
                actions_on_all_zones_leave_those_that_are_empty_by_their_turn,
                resetting_a_thousand_zones_delays_nobody,
                pairs_are_refused_where_there_are_zones,
            }
            raw_zone_runs {
                all_zones_are_changed_side_by_side,
                runs_that_fail_leave_every_zone_usable,
                runs_that_fail_half_way_give_back_what_the_storage_did,
                actions_on_all_zones_ask_of_those_that_are_not_known,
                zones_that_the_storage_says_nothing_of_take_resets_alone,
                commands_are_answered_in_the_middle_of_an_action_on_all_zones,
            }
            raw_fused {
                compare_and_write_writes_only_what_it_compared,
                halves_that_do_not_fit_are_refused_and_nothing_is_written,
                half_alone_waits_for_its_second_and_can_be_aborted,
                pairs_against_plain_writes_of_another_queue_are_never_torn,
            }
            load {
                discovery_lists_what_is_served_and_identify_tells_it,
                hundred_subsystems_are_discovered_in_pieces,
                blocking_calls_store_and_fetch,
                data_are_right_under_a_random_mixed_load,
                data_are_right_on_a_file,
                deepest_queue_is_served,
                hundred_and_twenty_eight_queues_are_served,
                tiny_pool_is_back_pressure_and_not_an_error,
                lost_connections_heal_and_no_write_is_lost,
                host_without_a_policy_tells_of_the_loss,
                errors_of_the_disk_reach_the_host_that_asked,
                bench_measures_and_verifies,
            }
            live {
                namespaces_come_and_go_under_load,
                removal_waits_for_commands_under_way,
                grown_and_shrunk_storage_is_seen,
                subsystems_come_and_go_whole,
                refused_changes_leave_everything_as_it_was,
                hosts_are_let_in_and_put_out,
                listeners_come_and_go,
                status_tells_who_is_connected,
                figures_of_a_connected_host_outlive_those_of_others,
            }
            plans {
                a_plan_that_fails_half_way_loses_nothing,
                a_removal_that_waits_for_a_disk_is_no_refusal,
            }
            plan_windows {
                what_may_come_back_is_not_ready_and_nothing_else,
                a_copy_keeps_its_blocks_through_a_refused_plan,
                a_lock_that_ends_while_its_namespace_is_away_holds_nothing,
                a_new_life_waits_for_writes_on_what_was_away,
                write_protection_under_way_is_flushed_or_not_told,
            }
            latency {
                latencies_are_what_the_host_measures,
                histograms_are_off_until_asked_for,
            }
            raw_ends {
                queues_tell_why_they_ended,
                keep_alive_shutdown_and_stop_are_told_apart,
                commands_replacements_and_operators_are_told_apart,
            }
            raw_told {
                atomic_write_units_are_one_block,
                rotational_storage_is_told,
                queues_without_flow_control_are_told_no_head,
                thousand_and_twenty_four_namespaces_are_served,
            }
            raw_limits {
                whole_queue_at_once_is_served,
                stalled_disk_leaves_admin_commands_alone,
                aborts_of_stalled_commands_are_answered_and_harm_nobody,
                aborted_commands_end_while_the_disk_is_stalled,
                connections_without_a_connect_command_are_closed,
                vanished_host_is_forgotten_after_its_keep_alive,
                io_alone_keeps_the_association_alive,
                keep_alives_are_answered_beside_full_queues,
                reset_under_io_lets_no_old_write_land,
                ended_queues_with_commands_in_the_disk_come_back_to_zero,
            }
        }
    };
}

mod local {
    every_scenario!(crate::rig::LocalRig);

    /// Needs a machine with no other target on it.
    #[test]
    fn wildcard_listener_is_told_as_the_address_that_was_reached() {
        crate::raw_told::wildcard_listener_is_told_as_the_address_that_was_reached();
    }
}

mod soft {
    every_scenario!(crate::rig::SoftRig);

    /// Needs queue pairs that post no receives.
    #[test]
    fn who_takes_no_answers_loses_its_buffers_when_others_wait() {
        crate::raw_shares::who_takes_no_answers_loses_its_buffers_when_others_wait::<crate::rig::SoftRig>();
    }

    /// Needs threads with an address in common.
    #[test]
    fn threads_of_one_provider_connect_at_once() {
        crate::load::threads_of_one_provider_connect_at_once();
    }

    /// Needs two devices.
    #[test]
    fn receives_of_an_idle_device_serve_another() {
        crate::raw_shares::receives_of_an_idle_device_serve_another::<crate::rig::SoftRig>();
    }

    /// Needs queue pairs that post no receives.
    #[test]
    fn who_takes_no_answers_is_closed_and_nobody_else() {
        crate::raw_limits::who_takes_no_answers_is_closed_and_nobody_else::<crate::rig::SoftRig>();
    }
}

/// What only the in-process provider can be made to do.
mod local_ends;
mod local_faults;

/// What takes real time, on the software stack.
mod neighbours;

//! Tests of every kind of cache on every store, generic over the backend. [`campaign!`](crate::campaign!)
//! instantiates them for one backend.

pub mod caches;
pub mod contiguous;
pub mod estimates;
pub mod isolation;
pub mod recurrent;
pub mod saving;
pub mod sharing;
pub mod unread;

use crate::backend::{Backend, Tensor};

/// Returns `n` rows of `heads` heads, in which every element is `value`.
fn filled<B: Backend>(heads: usize, n: usize, dim: usize, value: f32) -> Tensor<B> {
    B::tensor(&vec![vec![vec![value; dim]; heads]; n])
}

fn ones<B: Backend>(heads: usize, n: usize, dim: usize) -> Tensor<B> {
    filled::<B>(heads, n, dim, 1.0)
}

/// Creates a test for each function of the campaign, on this backend.
#[macro_export]
macro_rules! campaign {
    ($backend:ty) => {
        $crate::campaign! {
            $backend, true;
            caches::attention_matches_the_model,
            contiguous::equals_a_list_of_rows_over_generated_operations,
            contiguous::buffers_match_estimates_at_every_growth,
            contiguous::one_step_at_a_time_and_every_layer,
            contiguous::threads_may_take_turns,
            isolation::values_that_are_not_finite_reach_no_other_sequence,
            isolation::rows_of_an_aborted_step_reach_no_sequence,
            isolation::a_failed_step_is_rolled_back,
            isolation::a_conversion_by_hand_lasts_until_the_cache_is_cleared,
            isolation::candidates_do_not_count_for_quantized_kv_start,
            isolation::at_capacity_is_the_maximum_memory,
            recurrent::recurrent_layers_answer_as_if_each_text_ran_alone,
            recurrent::marks_hold_for_the_text_that_begins_next,
            recurrent::memory_of_recurrent_layers_matches_estimates,
            sharing::caches_that_share_rows_answer_as_those_that_do_not,
            unread::values_that_are_not_finite_undo_a_committed_step,
            unread::a_step_that_was_committed_unread_stays,
            unread::steps_that_cannot_be_undone_are_read_immediately,
            estimates::memory_matches_estimates_at_every_length,
        }
        $crate::campaign! {
            $backend, <$backend as $crate::backend::Backend>::SAVES;
            saving::loaded_caches_continue_like_saved_ones,
            saving::a_file_that_does_not_fit_is_refused,
            saving::float_formats_are_converted,
            saving::damaged_files_are_refused_and_change_nothing,
            saving::a_sequence_joins_others_that_stay,
            saving::a_sequence_goes_on_alike,
            saving::a_sequence_that_does_not_fit_is_refused,
            saving::a_sequence_that_is_not_finite_joins_no_others,
        }
    };
    ($backend:ty, $runs:expr; $($file:ident::$test:ident,)+) => {
        $(
            #[test]
            fn $test() {
                if $runs {
                    $crate::campaign::$file::$test::<$backend>();
                }
            }
        )+
    };
}

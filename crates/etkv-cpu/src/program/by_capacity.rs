//! A choice between two tensors by the capacity of the cache. It is used for rotary embeddings with separate
//! frequencies for long texts.

use etkv_core::Result;
use tracing::debug;

use super::forward::entry_of;
use super::payload::SelectByCapacity;
use super::TARGET;

/// The number of tensors to choose from: one for capacities up to the limit, and one for capacities above it.
pub const N_INPUTS: usize = 2;

/// Returns the index of the tensor that a program uses. If it is the second, the cache records that its
/// capacity exceeds the limit. Without a cache, it is the first.
///
/// # Errors
/// [`NoCache`](etkv_core::Status::NoCache) for an unknown key, and [`Kind`](etkv_core::Status::Kind) for a
/// cache of another backend, or a cache with rows that were computed with the other tensor.
pub fn choose(choice: &SelectByCapacity, key: Option<&str>) -> Result<usize> {
    let Some(key) = key else {
        return Ok(0);
    };
    let cache = entry_of(key)?.cache;
    if cache.capacity() <= choice.limit {
        return Ok(0);
    }
    debug!(target: TARGET, limit = choice.limit, "the capacity exceeds a limit of the program");
    cache.lock()?.pass_limit(choice.limit)?;
    Ok(1)
}

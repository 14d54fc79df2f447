//! A choice by the capacity of the cache: the frequencies of a rotary embedding with a separate set for long
//! texts.

use etkv_core::Result;
use tracing::debug;

use super::forward::entry_of;
use super::payload::SelectByCapacity;
use super::TARGET;

/// The tensors to choose from: for capacities up to the limit, and above it.
pub const N_INPUTS: usize = 2;

/// Returns the number of the tensor that a program uses, and notes in its cache that the capacity passes the
/// limit. Without a cache it is the first tensor.
///
/// # Errors
/// [`NoCache`](etkv_core::Status::NoCache) for an unknown key, and [`Kind`](etkv_core::Status::Kind) for a
/// cache of another backend, or one with rows of the other choice.
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

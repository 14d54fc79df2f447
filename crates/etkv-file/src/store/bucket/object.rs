//! An object that is read in ranges. While reads are consecutive, the next ranges are prefetched.

use std::collections::VecDeque;
use std::io::{self, Read, Seek, SeekFrom};
use std::ops::Range;
use std::sync::Arc;

use object_store::path::Path;
use object_store::{GetOptions, ObjectStore};
use tokio::task::JoinHandle;

use super::BucketClient;

/// The number of bytes of the first request for an object. In most objects, these bytes contain the header and the
/// token ids.
const FIRST: u64 = 256 << 10;

/// The maximum number of bytes of a request.
const MAX: u64 = 8 << 20;

/// The number of concurrent prefetch requests.
const AHEAD: usize = 3;

/// Bytes of an object, starting at an offset.
#[derive(Default)]
struct Part {
    begins: u64,
    bytes: Vec<u8>,
}

impl Part {
    fn ends(&self) -> u64 {
        self.begins + self.bytes.len() as u64
    }

    /// Returns the bytes at and after an offset, if there are any.
    fn from(&self, position: u64) -> Option<&[u8]> {
        let at = usize::try_from(position.checked_sub(self.begins)?).ok()?;
        self.bytes.get(at..).filter(|rest| !rest.is_empty())
    }
}

pub struct Object {
    shared: Arc<BucketClient>,
    at: Path,
    /// The version of the object that was opened. Another version with the same name is refused.
    version: Option<String>,
    len: u64,
    /// The start of the object, which is read twice, because the checksums are read before the token ids.
    head: Part,
    part: Part,
    ahead: VecDeque<(Range<u64>, Fetch)>,
    position: u64,
}

type Fetch = JoinHandle<object_store::Result<FetchedRange>>;

/// The answer to a request for a range.
struct FetchedRange {
    len: u64,
    version: Option<String>,
    bytes: Vec<u8>,
}

async fn fetch(
    store: Arc<dyn ObjectStore>,
    at: Path,
    version: Option<String>,
    range: Range<u64>,
) -> object_store::Result<FetchedRange> {
    let options =
        GetOptions { if_match: version, range: Some(range.into()), ..GetOptions::default() };
    let got = store.get_opts(&at, options).await?;
    let (len, version) = (got.meta.size, got.meta.e_tag.clone());
    Ok(FetchedRange { len, version, bytes: got.bytes().await?.into() })
}

impl Object {
    pub fn open(shared: &Arc<BucketClient>, at: Path) -> io::Result<Self> {
        let first = fetch(Arc::clone(&shared.store), at.clone(), None, 0..FIRST);
        let FetchedRange { len, version, bytes } = shared.wait(first)?;
        if bytes.len() as u64 != len.min(FIRST) {
            return Err(other_length(bytes.len() as u64, len.min(FIRST)));
        }
        Ok(Self {
            shared: Arc::clone(shared),
            at,
            version,
            len,
            head: Part { begins: 0, bytes },
            part: Part::default(),
            ahead: VecDeque::new(),
            position: 0,
        })
    }

    pub fn len(&self) -> u64 {
        self.len
    }

    fn start(
        &self,
        range: Range<u64>,
    ) -> impl std::future::Future<Output = object_store::Result<FetchedRange>> {
        fetch(Arc::clone(&self.shared.store), self.at.clone(), self.version.clone(), range)
    }

    /// Fetches bytes, starting at the current position.
    fn fill(&mut self) -> io::Result<()> {
        let position = self.position;
        let follows = position == self.head.ends() || position == self.part.ends();
        if self.ahead.front().is_none_or(|(range, _)| range.start != position) {
            self.stop();
        }
        let most = if follows { MAX } else { FIRST };
        let (range, found) = match self.ahead.pop_front() {
            Some((range, fetch)) => {
                let found = self.shared.wait(async { Ok(fetch.await) })?;
                (range, found.map_err(io::Error::other)?.map_err(io::Error::from)?)
            }
            None => {
                let range = position..self.len.min(position + most);
                (range.clone(), self.shared.wait(self.start(range))?)
            }
        };
        let expected = range.end - range.start;
        if found.len != self.len || found.bytes.len() as u64 != expected {
            return Err(other_length(found.bytes.len() as u64, expected));
        }
        self.part = Part { begins: range.start, bytes: found.bytes };
        if follows {
            self.fetch_ahead(range.end);
        }
        Ok(())
    }

    /// Starts to fetch the bytes after `end`.
    fn fetch_ahead(&mut self, end: u64) {
        let mut next = self.ahead.back().map_or(end, |(range, _)| range.end);
        while self.ahead.len() < AHEAD && next < self.len {
            let Some(runtime) = &self.shared.runtime else { return };
            let range = next..self.len.min(next + MAX);
            next = range.end;
            let fetch = runtime.spawn(self.start(range.clone()));
            self.ahead.push_back((range, fetch));
        }
    }

    fn stop(&mut self) {
        self.ahead.drain(..).for_each(|(_, fetch)| fetch.abort());
    }
}

impl Drop for Object {
    fn drop(&mut self) {
        self.stop();
    }
}

impl Read for Object {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        if self.position >= self.len || into.is_empty() {
            return Ok(0);
        }
        let has = |object: &Self| {
            let parts = [&object.head, &object.part].into_iter();
            parts.filter_map(|part| part.from(object.position)).next().is_some()
        };
        if !has(self) {
            self.fill()?;
        }
        let found = self.head.from(self.position).or_else(|| self.part.from(self.position));
        let found = found.unwrap_or_default();
        let n = into.len().min(found.len());
        into[..n].copy_from_slice(&found[..n]);
        self.position += n as u64;
        Ok(n)
    }
}

impl Seek for Object {
    fn seek(&mut self, to: SeekFrom) -> io::Result<u64> {
        let position = match to {
            SeekFrom::Start(at) => Some(at),
            SeekFrom::End(by) => self.len.checked_add_signed(by),
            SeekFrom::Current(by) => self.position.checked_add_signed(by),
        };
        self.position = position.ok_or_else(|| io::Error::other("a seek before the beginning"))?;
        Ok(self.position)
    }
}

fn other_length(found: u64, expected: u64) -> io::Error {
    io::Error::other(format!("expected {expected} bytes, got {found}"))
}

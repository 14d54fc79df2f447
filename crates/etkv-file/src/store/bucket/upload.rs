//! Writes an object: a small object in a single request, and a larger object in parts. It becomes visible when all
//! parts are complete.

use std::io::{self, Write};

use object_store::path::Path;
use object_store::{ObjectStoreExt, WriteMultipart};
use tracing::debug;

use super::{BucketClient, TARGET};

/// The number of bytes of a part of an upload, unless that would give too many parts.
const PART: u64 = 8 << 20;

/// The number of parts of an upload that are sent at the same time. Each needs separate memory.
const PARTS_AT_ONCE: usize = 3;

/// The maximum number of parts. S3 allows 10,000.
const MAX_PARTS: u64 = 9_000;

pub struct Upload<'a> {
    shared: &'a BucketClient,
    at: Path,
    part: usize,
    pending: Vec<u8>,
    parts: Option<WriteMultipart>,
}

impl<'a> Upload<'a> {
    /// Returns an upload of `bytes` bytes. Nothing is sent yet.
    pub fn new(shared: &'a BucketClient, at: Path, bytes: u64) -> Self {
        let part = PART.max(bytes.div_ceil(MAX_PARTS)) as usize;
        Self { shared, at, part, pending: Vec::new(), parts: None }
    }

    /// Waits until fewer than [`PARTS_AT_ONCE`] parts are in flight, and then sends the pending bytes.
    fn send(&mut self) -> io::Result<()> {
        let (store, part) = (&self.shared.store, self.part);
        let mut parts = match self.parts.take() {
            Some(parts) => parts,
            None => {
                let upload = self.shared.wait(store.put_multipart(&self.at))?;
                WriteMultipart::new_with_chunk_size(upload, part)
            }
        };
        let bytes = std::mem::take(&mut self.pending);
        let (parts, sent) = self.shared.wait(async move {
            let ready = parts.wait_for_capacity(PARTS_AT_ONCE).await;
            if ready.is_ok() {
                parts.put(bytes.into());
            }
            Ok((parts, ready))
        })?;
        self.parts = Some(parts);
        sent.map_err(io::Error::from)
    }

    /// Completes the object, so that it is visible.
    pub fn complete(mut self) -> io::Result<()> {
        if self.parts.is_none() {
            let bytes = std::mem::take(&mut self.pending);
            self.shared.wait(self.shared.store.put(&self.at, bytes.into()))?;
            return Ok(());
        }
        if !self.pending.is_empty() {
            if let Err(error) = self.send() {
                self.abort();
                return Err(error);
            }
        }
        match self.parts.take() {
            // A failed part aborts the upload.
            Some(parts) => self.shared.wait(parts.finish()).map(drop),
            None => Ok(()),
        }
    }

    /// Aborts the upload and removes its parts.
    pub fn abort(mut self) {
        if let Some(parts) = self.parts.take() {
            if let Err(error) = self.shared.wait(parts.abort()) {
                debug!(target: TARGET, %error, file = %self.at, "cannot abort an upload");
            }
        }
    }
}

impl Write for Upload<'_> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let n = bytes.len().min(self.part - self.pending.len());
        self.pending.extend_from_slice(&bytes[..n]);
        if self.pending.len() == self.part {
            self.send()?;
        }
        Ok(n)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

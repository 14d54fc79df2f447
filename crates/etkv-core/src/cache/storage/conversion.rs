//! Converts the rows of a cache to other formats.

use tracing::{debug_span, info, warn};

use super::Storage;
use crate::error::Result;
use crate::format::KvFormat;
use crate::store::Store;
use crate::watch::TARGET;

impl<S: Store> Storage<S> {
    /// Converts the rows if `length` positions reach `quantized_kv_start`.
    pub fn quantize_at(&mut self, length: i32) {
        if self.is_time_to_quantize(length) {
            // If there is too little memory, the rows stay in float, and the contents are still right. The next step
            // tries again. If that step has no room for rows in float, the step returns the error (see `check_floats`).
            let [k, v] = [self.config.k_format, self.config.v_format];
            if let Err(error) = self.convert([k, v]) {
                warn!(
                    target: TARGET,
                    length,
                    k_format = %k,
                    v_format = %v,
                    %error,
                    "a conversion failed; the next step tries again"
                );
            }
        }
    }

    /// Converts all rows to other formats.
    pub fn convert(&mut self, [k_format, v_format]: [KvFormat; 2]) -> Result<()> {
        let _span =
            debug_span!(target: TARGET, "convert", k_format = %k_format, v_format = %v_format)
                .entered();
        let formats = [k_format, v_format];
        self.config.check_formats(formats)?;
        let converted = self.convert_layers(formats);
        self.settle();
        converted?;
        if self.formats[0] != k_format && self.formats[1] != v_format {
            // No buffer reads the prefix any more.
            self.prefix = None;
            self.frozen.clear();
        }
        self.formats = formats;
        info!(target: TARGET, k_format = %k_format, v_format = %v_format, "the cache is converted");
        // Reaching `quantized_kv_start` later does not undo an explicit conversion.
        self.awaits = false;
        Ok(())
    }

    /// Converts layer by layer. Reserves the peak memory first, so that the budget does not refuse a conversion
    /// halfway.
    pub(super) fn convert_layers(&mut self, formats: [KvFormat; 2]) -> Result<()> {
        let layers = self.layers.groups.len();
        self.reserve_bytes(self.besides(formats, 0..layers))?;
        for layer in 0..layers {
            self.store.convert(layer, self.layers.layers[layer].formats(formats))?;
            let besides = self.besides(formats, layer + 1..layers);
            self.share.settle(self.held().saturating_add(besides));
        }
        Ok(())
    }
}

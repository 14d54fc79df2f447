//! Checks plans.

use crate::step::error::{fail, Result};
use crate::step::plan::{
    Address, Attend, Blend, Buffer, Columns, CopiedRows, Embed, Heads, Launch, Logits, Norm,
    Normalize, PackedWeight, PlaceHeads, Plan, Pool, PoolRows, Product, Weight, MAX_GROUPS,
    MAX_TOKENS,
};

/// The maximum number of elements of a buffer, rows of a table, and slots of a pool. The product of two such
/// numbers fits 64 bits, and twice one of them fits 32 bits.
const MAX: usize = 1 << 30;
/// The maximum number of elements of a row.
const LONGEST: usize = 1 << 24;
/// The maximum number of heads.
const MAX_HEADS: usize = 4096;
/// The elements that a thread reads at a time.
const PIECE: usize = 8;
/// The width of a tile: head dims and rotated elements are multiples of it.
const TILE: usize = 16;
/// The supported bits of a packed weight's codes.
const BITS: [usize; 2] = [4, 8];
/// The supported group sizes of a packed weight, in codes.
const GROUPS: [usize; 3] = [32, 64, 128];
/// The head dim must be a multiple of this number if a pool is packed, or for [`PlaceHeads`].
const PLACED: usize = 32;
/// The supported head dims.
const DIMS: std::ops::RangeInclusive<usize> = 32..=256;

/// Returns an error if no device can run the plan.
pub(crate) fn check(plan: &Plan) -> Result<()> {
    if !(1..=MAX_TOKENS).contains(&plan.tokens) {
        fail!(Plan, "{} tokens, expected 1 to {MAX_TOKENS}", plan.tokens);
    }
    if plan.attention_blocks == Some(0) {
        fail!(Plan, "0 blocks of attention, expected 1 or more");
    }
    for &elements in &plan.buffers {
        is_within("elements of a buffer", elements, 1, MAX)?;
    }
    is_within("groups", plan.masked.len(), 1, MAX_GROUPS)?;
    for group in (0..plan.masked.len()).filter(|&group| plan.is_masked(group)) {
        let is_own = |launch: &Launch| matches!(launch, Launch::Attend(own) if own.group == group);
        if !plan.launches.iter().any(is_own) {
            fail!(Plan, "a mask without attention");
        }
        check_lists(plan, group)?;
    }
    if plan.small_blocks && !plan.masked.contains(&true) {
        fail!(Plan, "small blocks of rows without a mask");
    }
    let mut work = Work { plan, written: vec![false; plan.buffers.len()] };
    work.check_given()?;
    for (number, launch) in plan.launches.iter().enumerate() {
        work.check_launch(launch).map_err(|error| match error {
            crate::Error::Plan(text) => crate::Error::Plan(format!("launch {number}: {text}")),
            error => error,
        })?;
    }
    work.check_tapped()?;
    match plan.logits {
        Some(logits) => work.check_logits(logits),
        None => Ok(()),
    }
}

/// Checks that all layers of a group can read the same lists of tiles. There is one list for each block of
/// rows.
fn check_lists(plan: &Plan, group: usize) -> Result<()> {
    let queries = plan.launches.iter().filter_map(|launch| match launch {
        Launch::Attend(attend) if attend.group == group => attend.n_q.checked_div(attend.n_kv),
        _ => None,
    });
    let (least, most) = queries.fold((usize::MAX, 0), |(a, b), n| (a.min(n), b.max(n)));
    if least < most {
        fail!(
            Plan,
            "layers of one group have {least} and {most} query heads for each KV head, expected \
             the same number"
        );
    }
    Ok(())
}

/// Returns the number of slots of a group's pools.
pub(crate) fn capacity(plan: &Plan, group: usize) -> usize {
    let of = |launch: &Launch| {
        let (own, keys, values) = match launch {
            Launch::Embed(_)
            | Launch::Normalize(_)
            | Launch::Blend(_)
            | Launch::Product(Product { heads: None, .. }) => return None,
            Launch::Product(Product { heads: Some(heads), .. })
            | Launch::PlaceHeads(PlaceHeads { heads, .. }) => {
                (heads.group, heads.keys, heads.values)
            }
            Launch::Attend(attend) => (attend.group, attend.keys, attend.values),
        };
        (own == group).then(|| keys.capacity.min(values.capacity))
    };
    plan.launches.iter().filter_map(of).min().unwrap_or(MAX)
}

/// A plan, and the buffers that its launches have written so far.
struct Work<'a> {
    plan: &'a Plan,
    written: Vec<bool>,
}

impl Work<'_> {
    fn check_launch(&mut self, launch: &Launch) -> Result<()> {
        match launch {
            Launch::Embed(embed) => self.check_embed(embed),
            Launch::Product(product) => self.check_product(product),
            Launch::Normalize(normalize) => self.check_normalize(normalize),
            Launch::Blend(blend) => self.check_blend(blend),
            Launch::PlaceHeads(place) => self.check_place(place),
            Launch::Attend(attend) => self.check_attend(attend),
        }
    }

    fn check_embed(&mut self, embed: &Embed) -> Result<()> {
        is_within("rows of a table", embed.vocabulary, 1, MAX)?;
        is_within("elements of a row", embed.inner, 1, LONGEST)?;
        is_weight("the table", embed.table, embed.inner)?;
        if let Some(scale) = embed.scale {
            is_address("the scale", scale, 2)?;
        }
        self.write(embed.out, self.plan.tokens * embed.inner)
    }

    fn check_product(&mut self, product: &Product) -> Result<()> {
        let Product { inner, outputs, .. } = *product;
        are_pieces(inner)?;
        is_within("outputs", outputs, 1, LONGEST)?;
        let rows = rows(self.plan, product);
        self.read(product.x, self.plan.tokens * inner)?;
        is_weight("the weight", product.weight, inner)?;
        if let Some(bias) = product.bias {
            is_address("the bias", bias, 2)?;
        }
        is_norm(product.norm)?;
        if product.norm.is_some_and(|norm| norm.wide) {
            fail!(Plan, "a product's norm has float32 weights; normalize the rows before it");
        }
        if let Some(residual) = product.residual {
            self.read(residual, rows * outputs)?;
        }
        if product.x == product.out {
            fail!(Plan, "the result is written over the input rows");
        }
        match &product.heads {
            None => self.write(product.out, rows * outputs),
            Some(heads) => {
                if product.gate.is_some() || product.residual.is_some() || product.last_row {
                    fail!(
                        Plan,
                        "a product of heads supports neither gate nor residual, and multiplies \
                         all rows"
                    );
                }
                self.check_heads(heads, outputs)?;
                if heads.rotated != heads.head_dim {
                    fail!(Plan, "a product rotates whole heads; place heads that rotate in part");
                }
                for pool in [heads.keys, heads.values] {
                    if !matches!(pool.rows, PoolRows::Plain(_)) {
                        fail!(Plan, "a product writes heads to plain pools only; place the heads");
                    }
                }
                self.write(product.out, rows * heads.n_q * heads.head_dim)
            }
        }
    }

    fn check_heads(&self, heads: &Heads, outputs: usize) -> Result<()> {
        let Heads { n_q, n_kv, head_dim, .. } = *heads;
        are_heads(n_q, n_kv, head_dim)?;
        self.has_group(heads.group)?;
        let expected = (n_q + 2 * n_kv) * head_dim;
        if outputs != expected {
            fail!(Plan, "{outputs} outputs, expected {expected} of {n_q}+2*{n_kv} heads");
        }
        are_placed(heads)
    }

    fn check_normalize(&mut self, normalize: &Normalize) -> Result<()> {
        let Normalize { x, inner, norm, residual, out, columns, next } = *normalize;
        are_pieces(inner)?;
        is_norm(Some(norm))?;
        let elements = self.plan.tokens * inner;
        self.read(x, elements)?;
        if let Some(residual) = residual {
            self.read(residual, elements)?;
        }
        match columns {
            None => self.write(out, elements)?,
            Some(columns) => self.check_columns(normalize, columns)?,
        }
        let mut buffers = vec![x, out];
        if let Some((norm, out)) = next {
            is_norm(Some(norm))?;
            self.write(out, elements)?;
            buffers.push(out);
        }
        let is_again = |(n, buffer): (usize, &Buffer)| buffers[..n].contains(buffer);
        if buffers.iter().enumerate().any(is_again)
            || next.is_some_and(|(_, out)| residual == Some(out))
        {
            fail!(Plan, "the result is written over the rows that are normalized");
        }
        Ok(())
    }

    fn check_columns(&mut self, normalize: &Normalize, columns: Columns) -> Result<()> {
        let (Columns { first, width }, inner) = (columns, normalize.inner);
        are_pieces(width)?;
        if first % PIECE != 0 {
            fail!(Plan, "columns from {first} on, expected a multiple of {PIECE}");
        }
        if width.checked_sub(inner).is_none_or(|most| first > most) {
            fail!(Plan, "{inner} columns from {first} on, in rows of {width}");
        }
        if normalize.next.is_some() || normalize.residual == Some(normalize.out) {
            fail!(Plan, "columns of wider rows support neither a residual nor a next norm");
        }
        self.write(normalize.out, self.plan.tokens * width)
    }

    fn check_blend(&mut self, blend: &Blend) -> Result<()> {
        let Blend { x, y, share, inner, out } = *blend;
        are_pieces(inner)?;
        let elements = self.plan.tokens * inner;
        self.read(x, elements)?;
        self.read(y, elements)?;
        self.read(share, self.plan.tokens)?;
        if share == out {
            fail!(Plan, "the result is written over the shares");
        }
        self.write(out, elements)
    }

    fn check_place(&mut self, place: &PlaceHeads) -> Result<()> {
        let PlaceHeads { heads, q_norm, k_norm, .. } = place;
        let Heads { n_q, n_kv, head_dim, .. } = *heads;
        are_heads(n_q, n_kv, head_dim)?;
        self.has_group(heads.group)?;
        if head_dim % PLACED != 0 {
            fail!(
                Plan,
                "heads of {head_dim} elements, expected a multiple of {PLACED} to place them"
            );
        }
        is_within("elements that rotate", heads.rotated, TILE, head_dim)?;
        if heads.rotated % TILE != 0 {
            fail!(Plan, "{} elements that rotate, expected a multiple of {TILE}", heads.rotated);
        }
        are_placed(heads)?;
        is_norm(*q_norm)?;
        is_norm(*k_norm)?;
        self.read(place.x, self.plan.tokens * (n_q + 2 * n_kv) * head_dim)?;
        if place.x == place.out {
            fail!(Plan, "the queries are written over the heads");
        }
        self.write(place.out, self.plan.tokens * n_q * head_dim)
    }

    fn check_attend(&mut self, attend: &Attend) -> Result<()> {
        let Attend { n_q, n_kv, head_dim, scale, .. } = *attend;
        are_heads(n_q, n_kv, head_dim)?;
        self.has_group(attend.group)?;
        is_pool("the keys", attend.keys, head_dim)?;
        is_pool("the values", attend.values, head_dim)?;
        if !scale.is_finite() {
            fail!(Plan, "a scale of {scale}, expected a finite one");
        }
        let elements = self.plan.tokens * n_q * head_dim;
        self.read(attend.q, elements)?;
        if attend.q == attend.out {
            fail!(Plan, "the result is written over the queries");
        }
        self.write(attend.out, elements)
    }

    fn has_group(&self, group: usize) -> Result<()> {
        match self.plan.masked.len() {
            n if group >= n => fail!(Plan, "group {group} of {n}"),
            _ => Ok(()),
        }
    }

    /// Checks the buffers that the host fills, and marks them as written.
    fn check_given(&mut self) -> Result<()> {
        for &buffer in &self.plan.given {
            self.has(buffer, self.plan.tokens)?;
            let elements = self.plan.buffers[buffer.0];
            if elements % self.plan.tokens != 0 {
                fail!(
                    Plan,
                    "buffer {} is filled by the host and has {elements} elements, expected a \
                     multiple of {}",
                    buffer.0,
                    self.plan.tokens
                );
            }
            if std::mem::replace(&mut self.written[buffer.0], true) {
                fail!(Plan, "buffer {} is listed twice in `given`", buffer.0);
            }
        }
        Ok(())
    }

    fn check_tapped(&self) -> Result<()> {
        let plan = self.plan;
        if plan.logits.is_none() && !plan.tapped.is_empty() {
            fail!(Plan, "tapped buffers without logits");
        }
        for (n, &buffer) in plan.tapped.iter().enumerate() {
            self.read(buffer, plan.tokens)?;
            let elements = plan.buffers[buffer.0];
            if elements % PIECE != 0 {
                fail!(Plan, "{elements} tapped elements, expected a multiple of {PIECE}");
            }
            let has_logits = plan.logits.is_some_and(|logits| logits.buffer == buffer);
            let others = plan.tapped[..n].iter().chain(&plan.given);
            if has_logits || others.into_iter().any(|&other| other == buffer) {
                fail!(Plan, "buffer {} is tapped twice, also given, or the logits", buffer.0);
            }
        }
        Ok(())
    }

    fn check_logits(&self, logits: Logits) -> Result<()> {
        is_within("rows of logits", logits.rows, 1, MAX_TOKENS)?;
        is_within("logits of a row", logits.vocabulary, 1, LONGEST)?;
        if logits.copied == CopiedRows::Last && logits.rows != self.plan.tokens {
            fail!(
                Plan,
                "{} rows of logits, expected {} to copy the row of the last token",
                logits.rows,
                self.plan.tokens
            );
        }
        self.read(logits.buffer, logits.rows * logits.vocabulary)
    }

    fn read(&self, buffer: Buffer, elements: usize) -> Result<()> {
        self.has(buffer, elements)?;
        if !self.written[buffer.0] {
            fail!(Plan, "buffer {} is read before it is written", buffer.0);
        }
        Ok(())
    }

    fn write(&mut self, buffer: Buffer, elements: usize) -> Result<()> {
        self.has(buffer, elements)?;
        self.written[buffer.0] = true;
        Ok(())
    }

    fn has(&self, Buffer(index): Buffer, elements: usize) -> Result<()> {
        match self.plan.buffers.get(index) {
            Some(&found) if found >= elements => Ok(()),
            Some(found) => {
                fail!(Plan, "buffer {index} has {found} elements, expected {elements}")
            }
            None => fail!(Plan, "buffer {index} of {}", self.plan.buffers.len()),
        }
    }
}

/// Returns the rows that a product multiplies.
pub(crate) fn rows(plan: &Plan, product: &Product) -> usize {
    if product.last_row {
        1
    } else {
        plan.tokens
    }
}

fn is_within(what: &str, value: usize, least: usize, most: usize) -> Result<()> {
    if !(least..=most).contains(&value) {
        fail!(Plan, "{value} {what}, expected {least} to {most}");
    }
    Ok(())
}

/// Checks the width of rows that threads read 16 bytes at a time.
fn are_pieces(inner: usize) -> Result<()> {
    is_within("elements of a row", inner, PIECE, LONGEST)?;
    if inner % PIECE != 0 {
        fail!(Plan, "rows of {inner} elements, expected a multiple of {PIECE}");
    }
    Ok(())
}

fn are_heads(n_q: usize, n_kv: usize, head_dim: usize) -> Result<()> {
    is_within("heads", n_q, 1, MAX_HEADS)?;
    is_within("heads of keys", n_kv, 1, n_q)?;
    if n_q % n_kv != 0 {
        fail!(Plan, "{n_q} heads, expected a multiple of {n_kv}");
    }
    if !DIMS.contains(&head_dim) || head_dim % TILE != 0 {
        fail!(
            Plan,
            "heads of {head_dim} elements, expected a multiple of {TILE} of {} to {}",
            DIMS.start(),
            DIMS.end()
        );
    }
    Ok(())
}

/// Checks the pools of the heads, and the periods.
fn are_placed(heads: &Heads) -> Result<()> {
    if let Some(periods) = heads.periods {
        is_address("the periods", periods, 4)?;
    }
    is_pool("the keys", heads.keys, heads.head_dim)?;
    is_pool("the values", heads.values, heads.head_dim)
}

fn is_norm(norm: Option<Norm>) -> Result<()> {
    let Some(norm) = norm else {
        return Ok(());
    };
    if let Some(weight) = norm.weight {
        is_address("the weight of the norm", weight, if norm.wide { 4 } else { 2 })?;
    }
    if !(norm.eps >= 0.0 && norm.eps.is_finite()) {
        fail!(Plan, "an epsilon of {}, expected 0 or more", norm.eps);
    }
    Ok(())
}

fn is_pool(what: &str, pool: Pool, head_dim: usize) -> Result<()> {
    is_within("rows of a pool", pool.capacity, 1, MAX)?;
    let rows = match pool.rows {
        PoolRows::Plain(address) => return is_address(what, address, 16),
        PoolRows::Packed(rows) => rows,
    };
    if head_dim % PLACED != 0 {
        fail!(Plan, "{what} with rows of {head_dim} elements, expected a multiple of {PLACED}");
    }
    if let Err(error) = rows.format.check(head_dim as i32) {
        fail!(Plan, "{what}: {}", error.message());
    }
    let Some(packing) = rows.format.packing() else {
        fail!(
            Plan,
            "{what} as packed rows in {}, a float format; expected a packed format",
            rows.format
        );
    };
    is_address(&format!("the codes of {what}"), rows.codes, 16)?;
    is_address(&format!("the scales of {what}"), rows.scales, 16)?;
    match (packing.has_offsets, rows.offsets) {
        (true, Some(offsets)) => is_address(&format!("the offsets of {what}"), offsets, 16),
        (true, None) => fail!(Plan, "{what} without offsets"),
        (false, Some(_)) => fail!(Plan, "{what} with offsets, which their format lacks"),
        (false, None) => Ok(()),
    }
}

fn is_weight(what: &str, weight: Weight, inner: usize) -> Result<()> {
    let PackedWeight { codes, scales, biases, bits, group } = match weight {
        Weight::Plain(address) => return is_address(what, address, 2),
        Weight::Packed(packed) => packed,
    };
    if !BITS.contains(&bits) {
        fail!(Plan, "{what} of {bits} bits, expected {BITS:?}");
    }
    if !GROUPS.contains(&group) {
        fail!(Plan, "{what} in groups of {group}, expected {GROUPS:?}");
    }
    if inner % group != 0 {
        fail!(Plan, "{what} with rows of {inner} elements, expected a multiple of {group}");
    }
    // A thread reads 16 bytes of codes at a time.
    is_address(&format!("the codes of {what}"), codes, 16)?;
    is_address(&format!("the scales of {what}"), scales, 2)?;
    is_address(&format!("the biases of {what}"), biases, 2)
}

fn is_address(what: &str, Address(address): Address, multiple: u64) -> Result<()> {
    if address == 0 || address % multiple != 0 {
        fail!(Plan, "{what} at {address:#x}, expected a multiple of {multiple} above 0");
    }
    Ok(())
}

#[cfg(test)]
mod tests;

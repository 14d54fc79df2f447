//! Builds plans from a recipe. The shapes are computed once, the addresses for each step.

mod hidden;
mod norms;

use std::cell::Cell;
use std::collections::{HashMap, HashSet};
use std::sync::Arc;

use etkv_core::KvFormat;
use etkv_cuda::{
    Address, Attend, Blend, Buffer, Element, Embed, Heads, KeyMask, Launch, Logits, Norm,
    PlaceHeads, Plan, Pool, PoolRows, Product, Weight, MAX_TOKENS,
};
use mlx_rs::{Array, Dtype};
use smallvec::SmallVec;

use super::heads::LayerHeads;
use super::packed::PackedConstants;
use super::pools;
use super::recipe::{self, Part, Recipe};
use super::rows::Groups;
use super::{element_of, Kind, StepResult};
use etkv::mlx;
use etkv::MlxStore;
use etkv_mlx_program::ir::{self, Value};

/// The width of rows must be a multiple of this number if a separate kernel normalizes or blends them.
const PIECE: usize = 8;
/// The query rows of a small attention block, and of the largest one.
const SMALL_BLOCK: usize = 16;
const LARGE_BLOCK: usize = 64;

/// The shapes of a recipe's parts.
pub struct Planner {
    pub element: Element,
    pub dtype: Dtype,
    pub vocabulary: usize,
    /// Whether the kernels of many rows support the program's weights and heads.
    pub takes_many: bool,
    /// The number of rows of the embedding table.
    n_ids: usize,
    /// The width of each buffer's rows, in elements.
    widths: Vec<usize>,
    /// The maximum number of query heads that share a KV head.
    group: usize,
    /// The number of KV heads and the head dim of each layer.
    layers: Vec<(usize, usize)>,
    /// The constants that are read, in the order of the parts.
    constants: Vec<Value>,
    /// The constants that are float32 weights of norms.
    wide: HashSet<Value>,
    /// For each buffer that is a range of columns of a wider one: the wider buffer, and the first column.
    columns: HashMap<usize, (usize, usize)>,
}

/// The current addresses of all arrays that a step reads or writes.
#[derive(Debug, PartialEq, Eq)]
pub struct StepAddresses {
    constants: Vec<u64>,
    pools: Vec<[Pool; 2]>,
    pub groups: Arc<Groups>,
}

impl Planner {
    /// Checks the constants of a recipe and reads their shapes. Returns `None` if the kernels do not support
    /// them.
    pub fn of(recipe: &Recipe, constants: &[Option<Array>]) -> Option<Self> {
        let array = |value: Value| constants.get(value.0 as usize)?.as_ref();
        let dtype = array(recipe.table()?)?.dtype();
        let mut planner = Self {
            element: element_of(dtype)?,
            dtype,
            vocabulary: 0,
            takes_many: true,
            n_ids: 0,
            widths: vec![0; recipe.n_buffers],
            group: 1,
            layers: Vec::new(),
            constants: Vec::new(),
            wide: HashSet::new(),
            columns: HashMap::new(),
        };
        planner.add_given(recipe)?;
        for part in &recipe.parts {
            match part {
                Part::Embed { table, scale, out } => {
                    let (rows, inner) = weight_sizes(*table, dtype, &array)?;
                    planner.n_ids = rows;
                    planner.widths[*out] = inner;
                    planner.add_weight(*table);
                    let is_one = |found: &Array| found.size() == 1 && found.dtype() == dtype;
                    scale.is_none_or(|scale| array(scale).is_some_and(is_one)).then_some(())?;
                    planner.constants.extend(scale);
                }
                Part::Normalize(rows) => planner.add_normalize(rows, &array)?,
                Part::Join { x, out } => planner.add_join(x, *out),
                Part::Blend { x, y, share, out } => planner.add_blend([*x, *y, *share], *out)?,
                Part::Product(product) => planner.add(product, dtype, &array)?,
                Part::Attend { q, out, dtype: out_dtype, .. } => {
                    out_dtype.is_none_or(|out_dtype| out_dtype == dtype).then_some(())?;
                    planner.widths[*out] = planner.widths[*q];
                }
            }
        }
        planner.vocabulary = planner.widths[recipe.logits];
        (planner.vocabulary > 0).then_some(planner)
    }

    fn add<'a>(
        &mut self,
        product: &recipe::Product,
        dtype: Dtype,
        array: &dyn Fn(Value) -> Option<&'a Array>,
    ) -> Option<()> {
        let (rows, inner) = weight_sizes(product.weight, dtype, array)?;
        let is_row = |value: Option<Value>, n: usize, dtype: Dtype| {
            value.is_none_or(|value| array(value).is_some_and(|found| is_vector(found, n, dtype)))
        };
        let norm = product.norm.and_then(|norm| norm.weight);
        let halves = if product.gate.is_some() { 2 } else { 1 };
        let fits = self.widths[product.x] == inner
            && rows % halves == 0
            && is_row(product.bias, rows, dtype)
            && is_row(norm, inner, dtype)
            && product.residual.is_none_or(|residual| self.widths[residual] == rows);
        fits.then_some(())?;
        self.add_weight(product.weight);
        self.constants.extend(product.bias.iter().chain(&norm));
        let mut width = rows / halves;
        if let Some(heads) = &product.heads {
            let &LayerHeads { n_q, n_kv, head_dim, rotation, rotated, q_norm, k_norm, .. } = heads;
            let periods = rotation.map(|(periods, _)| periods);
            let is_placed = q_norm.is_some() || k_norm.is_some() || rotated != head_dim;
            let fits = (n_q + 2 * n_kv) * head_dim == rows
                && n_kv > 0
                && heads.layer == self.layers.len()
                && rotation.is_none_or(|(_, out_dtype)| out_dtype == dtype)
                && is_row(periods, rotated / 2, Dtype::Float32)
                && rotated % 16 == 0
                && (16..=head_dim).contains(&rotated)
                && (!is_placed || head_dim % pools::PLACED == 0);
            fits.then_some(())?;
            self.layers.push((n_kv, head_dim));
            self.group = self.group.max(n_q / n_kv);
            self.constants.extend(periods);
            for norm in q_norm.iter().chain(&k_norm) {
                self.add_norm(*norm, head_dim, array)?;
            }
            width = n_q * head_dim;
        }
        self.widths[product.out] = width;
        Some(())
    }

    fn add_weight(&mut self, weight: recipe::Weight) {
        match weight {
            recipe::Weight::Plain { value, .. } => self.constants.push(value),
            recipe::Weight::Packed(PackedConstants { codes, scales, biases, .. }) => {
                self.takes_many = false;
                self.constants.extend([codes, scales, biases]);
            }
        }
    }

    /// Returns whether small blocks of rows suit a mask: its tokens have so few visible keys in common that
    /// small blocks read little more than large ones. All warps of a small block work on each tile of keys,
    /// whereas most warps of a large block see no key of the tile.
    pub fn prefers_small_blocks(&self, mask: &KeyMask) -> bool {
        let read = |rows| mask.tiles_of_blocks(self.group, rows);
        let is_one = mask.n_tokens() * self.group <= SMALL_BLOCK;
        !is_one && 2 * read(SMALL_BLOCK) < 3 * read(LARGE_BLOCK)
    }

    /// Returns ids in the kernels' type, or `None` if the table has no row for one of them.
    pub fn ids(&self, ids: &[i64]) -> Option<SmallVec<[i32; MAX_TOKENS]>> {
        let known =
            |&id: &i64| i32::try_from(id).ok().filter(|&id| (id as usize) < self.n_ids && id >= 0);
        ids.iter().map(known).collect()
    }

    /// Returns whether the kernels support caches of these formats.
    pub fn can_store(&self, formats: [KvFormat; 2]) -> bool {
        let takes = |format, head_dim| pools::takes(format, head_dim, self.element);
        let of_layer = |&(_, head_dim): &(usize, usize)| {
            formats.into_iter().all(|format| takes(format, head_dim))
        };
        self.layers.iter().all(of_layer)
    }

    /// Returns the current addresses, after MLX has computed the arrays, or the reason why the kernels cannot
    /// read them.
    pub fn addresses(
        &self,
        store: &MlxStore,
        constants: &[Option<Array>],
        groups: Arc<Groups>,
    ) -> StepResult<StepAddresses> {
        if groups.of_layer().len() != self.layers.len() {
            return Err("the cache and the program differ in their number of layers");
        }
        let of_constant = |value: &Value| address(constants.get(value.0 as usize)?.as_ref()?);
        let constants = self.constants.iter().map(of_constant).collect::<Option<_>>();
        let constants = constants.ok_or("a constant has no address that kernels can read")?;
        let of_layer = |(layer, &(n_kv, head_dim)): (usize, &(usize, usize))| {
            let [k, v] = store.planes(layer).ok_or("the cache reads frozen rows")?;
            let is_known = Cell::new(true);
            let address = |array: &Array| {
                let found = address(array);
                is_known.set(is_known.get() && found.is_some());
                found
            };
            let at = |pool| {
                pools::pool_at(pool, n_kv, head_dim, self.element, address).ok_or(
                    match is_known.get() {
                        true => "no kernel for the cache's shapes, strides or dtypes",
                        false => "the cache's buffers have no address",
                    },
                )
            };
            Ok([at(&k)?, at(&v)?])
        };
        let pools = self.layers.iter().enumerate().map(of_layer).collect::<StepResult<_>>()?;
        Ok(StepAddresses { constants, pools, groups })
    }

    /// Returns the plan of a kind of step, with the current addresses.
    pub fn plan(&self, recipe: &Recipe, places: &StepAddresses, kind: &Kind) -> Plan {
        let &Kind { tokens, ref masked, small_blocks, copied, chosen } = kind;
        let mut addresses = places.constants.iter().map(|&address| Address(address));
        // There are as many addresses as the parts need.
        let mut next = || addresses.next().unwrap_or(Address(0));
        // The width of the buffer for heads that the product cannot write into the pools itself. Each launch
        // waits for the previous one, so all layers share this buffer.
        let mut unplaced = None;
        let mut launches = Vec::new();
        for part in &recipe.parts {
            match part {
                Part::Embed { table, scale, out } => launches.push(Launch::Embed(Embed {
                    table: weight_at(*table, &mut next),
                    scale: scale.map(|_| next()),
                    vocabulary: self.n_ids,
                    inner: self.widths[*out],
                    out: Buffer(*out),
                })),
                Part::Product(product) => {
                    let (made, norms) = self.product(product, places, &mut next);
                    match made.heads.filter(|heads| !fits_product(heads, norms)) {
                        None => launches.push(Launch::Product(made)),
                        Some(heads) => {
                            let x = Buffer(self.widths.len());
                            unplaced = Some(made.outputs.max(unplaced.unwrap_or(0)));
                            let product = Product { heads: None, out: x, ..made };
                            let ([q_norm, k_norm], out) = (norms, made.out);
                            let place = PlaceHeads { x, heads, q_norm, k_norm, out };
                            launches.extend([Launch::Product(product), Launch::PlaceHeads(place)]);
                        }
                    }
                }
                Part::Normalize(rows) => {
                    launches.push(Launch::Normalize(self.normalize(rows, &mut next)));
                }
                // The norms write the joined rows directly.
                Part::Join { .. } => {}
                Part::Blend { x, y, share, out } => launches.push(Launch::Blend(Blend {
                    x: Buffer(*x),
                    y: Buffer(*y),
                    share: Buffer(*share),
                    inner: self.widths[*out],
                    out: Buffer(*out),
                })),
                Part::Attend { layer, q, scale, out, .. } => {
                    let (n_kv, head_dim) = self.layers[*layer];
                    let [keys, values] = places.pools[*layer];
                    launches.push(Launch::Attend(Attend {
                        group: places.groups.of_layer()[*layer],
                        q: Buffer(*q),
                        keys,
                        values,
                        n_q: self.widths[*q] / head_dim,
                        n_kv,
                        head_dim,
                        scale: *scale,
                        out: Buffer(*out),
                    }));
                }
            }
        }
        Plan {
            element: self.element,
            tokens,
            buffers: self.widths.iter().chain(&unplaced).map(|width| width * tokens).collect(),
            launches,
            given: recipe.given.iter().map(|given| Buffer(given.buffer)).collect(),
            logits: Some(Logits {
                buffer: Buffer(recipe.logits),
                rows: tokens,
                vocabulary: self.vocabulary,
                copied,
                chosen,
            }),
            tapped: recipe.tapped.iter().map(|&tapped| Buffer(tapped)).collect(),
            overlap: true,
            attention_blocks: None,
            masked: masked.to_vec(),
            small_blocks,
        }
    }

    /// Returns a product, and the norms of its query heads and key heads.
    fn product(
        &self,
        product: &recipe::Product,
        places: &StepAddresses,
        next: &mut dyn FnMut() -> Address,
    ) -> (Product, [Option<Norm>; 2]) {
        // The addresses are in the order in which the constants were added.
        let weight = weight_at(product.weight, next);
        let bias = product.bias.map(|_| next());
        let norm = product.norm.map(|ir::Norm { weight, eps, .. }| Norm {
            weight: weight.map(|_| next()),
            wide: false,
            eps,
        });
        let mut norms = [None; 2];
        let heads = product.heads.as_ref().map(|heads| {
            let &LayerHeads { layer, n_q, n_kv, head_dim, rotation, rotated, q_norm, k_norm } =
                heads;
            let [keys, values] = places.pools[layer];
            let periods = rotation.map(|_| next());
            norms = [q_norm, k_norm].map(|norm| norm.map(|norm| self.row_norm(norm, next)));
            let group = places.groups.of_layer()[layer];
            Heads { group, n_q, n_kv, head_dim, periods, rotated, keys, values }
        });
        let product = Product {
            x: Buffer(product.x),
            last_row: false,
            weight,
            inner: self.widths[product.x],
            outputs: match heads {
                Some(heads) => (heads.n_q + 2 * heads.n_kv) * heads.head_dim,
                None => self.widths[product.out],
            },
            bias,
            norm,
            gate: product.gate,
            residual: product.residual.map(Buffer),
            heads,
            out: Buffer(product.out),
        };
        (product, norms)
    }
}

/// Returns whether a product can write its heads into the pools itself.
fn fits_product(heads: &Heads, norms: [Option<Norm>; 2]) -> bool {
    let is_plain = |pool: Pool| matches!(pool.rows, PoolRows::Plain(_));
    norms == [None; 2]
        && heads.rotated == heads.head_dim
        && is_plain(heads.keys)
        && is_plain(heads.values)
}

/// Returns a weight with the next addresses, which are in the order of [`Planner::add_weight`].
fn weight_at(weight: recipe::Weight, next: &mut dyn FnMut() -> Address) -> Weight {
    match weight {
        recipe::Weight::Plain { .. } => Weight::Plain(next()),
        recipe::Weight::Packed(PackedConstants { packing, .. }) => {
            Weight::Packed(etkv_cuda::PackedWeight {
                codes: next(),
                scales: next(),
                biases: next(),
                bits: packing.bits as usize,
                group: packing.group_size as usize,
            })
        }
    }
}

/// Returns the rows and columns of a weight, if the kernels support its layout.
fn weight_sizes<'a>(
    weight: recipe::Weight,
    dtype: Dtype,
    array: &dyn Fn(Value) -> Option<&'a Array>,
) -> Option<(usize, usize)> {
    let PackedConstants { codes, scales, biases, packing } = match weight {
        recipe::Weight::Plain { value, transposed } => {
            return matrix(array(value)?, dtype, transposed);
        }
        recipe::Weight::Packed(packed) => packed,
    };
    let (4 | 8, 32 | 64 | 128) = (packing.bits, packing.group_size) else {
        return None;
    };
    let (rows, words) = matrix(array(codes)?, Dtype::Uint32, false)?;
    let columns = words * 32 / packing.bits as usize;
    let groups = Some((rows, columns / packing.group_size as usize));
    let fits = columns % packing.group_size as usize == 0
        && matrix(array(scales)?, dtype, false) == groups
        && matrix(array(biases)?, dtype, false) == groups;
    fits.then_some((rows, columns))
}

/// Returns the rows and columns of a matrix. Returns `None` unless it is row-major (after the transposition)
/// and of this dtype.
fn matrix(array: &Array, dtype: Dtype, transposed: bool) -> Option<(usize, usize)> {
    let (&[a, b], &[along_a, along_b]) = (array.shape(), array.strides()) else {
        return None;
    };
    let (rows, columns, row, column) =
        if transposed { (b, a, along_b, along_a) } else { (a, b, along_a, along_b) };
    let is_plain = array.dtype() == dtype && column == 1 && row == columns as usize;
    is_plain.then_some((rows as usize, columns as usize))
}

fn is_vector(array: &Array, n: usize, dtype: Dtype) -> bool {
    array.dtype() == dtype && array.shape() == [n as i32] && array.strides() == [1]
}

/// Returns the device address of an array's first element. Waits until the elements are computed.
fn address(array: &Array) -> Option<u64> {
    for _ in 0..2 {
        let mut address = 0;
        // SAFETY: the handle is live; MLX runs on CUDA.
        mlx::check(unsafe { mlx_sys::etkv_mlx_array_address(&mut address, array.as_ptr()) })
            .ok()?;
        if address != 0 {
            return Some(address);
        }
        mlx::wait(array).ok()?;
    }
    None
}

#[cfg(test)]
mod tests;

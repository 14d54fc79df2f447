//! Decoders as plans.

use std::iter::once;

use etkv_cuda::{
    Address, Attend, Buffer, CopiedRows, Device, Element, Embed, Gate, Heads, KeyMask, Launch,
    Logits, Memory, Norm, PackedWeight, Plan, Pool, PoolRows, Product, Result, Weight,
};
use half::{bf16, f16};

#[derive(Debug, Clone, Copy)]
pub struct Shape {
    pub name: &'static str,
    pub element: Element,
    pub layers: usize,
    pub hidden: usize,
    pub n_q: usize,
    pub n_kv: usize,
    pub head_dim: usize,
    pub intermediate: usize,
    pub vocabulary: usize,
    pub capacity: usize,
    pub bias: bool,
    pub rotates: bool,
    pub packing: Option<Packing>,
}

#[derive(Debug, Clone, Copy)]
pub struct Packing {
    pub bits: usize,
    pub group: usize,
}

/// Random numbers, approximately normally distributed.
pub struct Random(pub u64);

impl Random {
    pub fn next(&mut self) -> f64 {
        let mut sum = 0.0;
        for _ in 0..6 {
            self.0 ^= self.0 << 13;
            self.0 ^= self.0 >> 7;
            self.0 ^= self.0 << 17;
            sum += (self.0 >> 11) as f64 / (1u64 << 53) as f64;
        }
        (sum - 3.0) * std::f64::consts::SQRT_2
    }

    /// Returns `n` numbers times `scale`, rounded to the elements' type.
    pub fn numbers(&mut self, element: Element, n: usize, scale: f64) -> Vec<f64> {
        (0..n).map(|_| rounded(element, scale * self.next())).collect()
    }

    pub fn below(&mut self, end: usize) -> usize {
        (self.next().abs() * 1e6) as usize % end
    }

    /// Returns a mask with each token's key, which `own` lists, and some runs of keys that overlap or are far apart.
    pub fn mask(&mut self, n_keys: usize, own: impl Iterator<Item = usize>) -> KeyMask {
        let runs_of = |own: usize| -> Vec<_> {
            let some = (0..self.below(4)).map(|_| {
                let start = self.below(n_keys);
                start..n_keys.min(start + 1 + self.below(200))
            });
            some.chain(once(own..own + 1)).collect()
        };
        let runs: Vec<Vec<_>> = own.map(runs_of).collect();
        KeyMask::of(runs.into_iter())
    }
}

/// Returns a number rounded to the elements' type.
pub fn rounded(element: Element, x: f64) -> f64 {
    match element {
        Element::F16 => f64::from(f16::from_f32(x as f32)),
        Element::Bf16 => f64::from(bf16::from_f32(x as f32)),
    }
}

pub fn to_bytes(element: Element, numbers: &[f64]) -> Vec<u8> {
    let bits = |&x: &f64| match element {
        Element::F16 => f16::from_f32(x as f32).to_le_bytes(),
        Element::Bf16 => bf16::from_f32(x as f32).to_le_bytes(),
    };
    numbers.iter().flat_map(bits).collect()
}

pub fn to_numbers(element: Element, bytes: &[u8]) -> Vec<f64> {
    let number = |bits: &[u8]| match element {
        Element::F16 => f64::from(f16::from_le_bytes([bits[0], bits[1]])),
        Element::Bf16 => f64::from(bf16::from_le_bytes([bits[0], bits[1]])),
    };
    bytes.chunks_exact(2).map(number).collect()
}

/// Allocates memory with these contents.
pub fn upload(device: &Device, bytes: &[u8]) -> Result<Memory> {
    let mut memory = device.allocate(bytes.len())?;
    memory.write(0, bytes)?;
    Ok(memory)
}

/// Returns the periods of a rotary embedding, on the host and on the device.
pub fn periods(device: &Device, half: usize) -> Result<(Vec<f64>, Memory)> {
    let period = |j: usize| 10_000f32.powf(j as f32 / half as f32);
    let periods: Vec<f32> = (0..half).map(period).collect();
    let bytes: Vec<u8> = periods.iter().flat_map(|period| period.to_le_bytes()).collect();
    Ok((periods.into_iter().map(f64::from).collect(), upload(device, &bytes)?))
}

/// Returns a launch that reads rows of a plain table.
pub fn embed(table: &Memory, vocabulary: usize, inner: usize, out: Buffer) -> Launch {
    let table = Weight::Plain(table.address());
    Launch::Embed(Embed { table, scale: None, vocabulary, inner, out })
}

/// Returns the plan with other rows of logits copied to the host.
pub fn copying(copied: CopiedRows, plan: Plan) -> Plan {
    Plan { logits: plan.logits.map(|logits| Logits { copied, ..logits }), ..plan }
}

/// A matrix, on the device and on the host.
pub struct Matrix {
    pub memory: Memory,
    /// The scales and biases, if `memory` has codes.
    groups: Option<(Packing, [Memory; 2])>,
    pub numbers: Vec<f64>,
}

impl Matrix {
    pub fn bytes(&self) -> usize {
        let groups = self.groups.iter().flat_map(|(_, groups)| groups);
        self.memory.bytes() + groups.map(Memory::bytes).sum::<usize>()
    }

    fn weight(&self) -> Weight {
        let address = self.memory.address();
        match &self.groups {
            None => Weight::Plain(address),
            Some((packing, [scales, biases])) => Weight::Packed(PackedWeight {
                codes: address,
                scales: scales.address(),
                biases: biases.address(),
                bits: packing.bits,
                group: packing.group,
            }),
        }
    }
}

/// The weights and the pools of a decoder.
pub struct Model {
    pub shape: Shape,
    pub weights: Vec<Matrix>,
    pub pools: Vec<Memory>,
    random: Option<Random>,
}

/// Indices of a layer's weights, after the table.
const NORM: usize = 0;
const QKV: usize = 1;
const BIAS: usize = 2;
const O: usize = 3;
const NORM_2: usize = 4;
const GATE_UP: usize = 5;
const DOWN: usize = 6;
const EACH: usize = 7;

impl Model {
    /// Creates a decoder with random weights, or with zeros.
    pub fn new(device: &Device, shape: Shape, random: Option<Random>) -> Result<Self> {
        let mut model = Self { shape, weights: Vec::new(), pools: Vec::new(), random };
        let Shape { hidden, intermediate, vocabulary, .. } = shape;
        let outputs = (shape.n_q + 2 * shape.n_kv) * shape.head_dim;
        model.add_matrix(device, vocabulary * hidden, 1.0)?;
        for _ in 0..shape.layers {
            let of = |inner: usize| 1.0 / (inner as f64).sqrt();
            model.add(device, hidden, 1.0)?;
            model.add_matrix(device, outputs * hidden, of(hidden))?;
            model.add(device, outputs, 0.5)?;
            model.add_matrix(device, hidden * shape.n_q * shape.head_dim, of(hidden))?;
            model.add(device, hidden, 1.0)?;
            model.add_matrix(device, 2 * intermediate * hidden, of(hidden))?;
            model.add_matrix(device, hidden * intermediate, of(intermediate))?;
            for _ in 0..2 {
                let elements = shape.n_kv * shape.capacity * shape.head_dim;
                model.pools.push(device.allocate(2 * elements)?);
            }
        }
        model.add(device, hidden, 1.0)?;
        model.add_matrix(device, vocabulary * hidden, 1.0 / (hidden as f64).sqrt())?;
        let (numbers, memory) = periods(device, shape.head_dim / 2)?;
        model.weights.push(Matrix { memory, groups: None, numbers });
        Ok(model)
    }

    fn add(&mut self, device: &Device, elements: usize, scale: f64) -> Result<()> {
        let element = self.shape.element;
        let mut memory = device.allocate(2 * elements)?;
        let mut numbers = Vec::new();
        if let Some(random) = &mut self.random {
            numbers = random.numbers(element, elements, scale);
            memory.write(0, &to_bytes(element, &numbers))?;
        }
        self.weights.push(Matrix { memory, groups: None, numbers });
        Ok(())
    }

    /// Adds a matrix, which is packed if the shape has a packing. Rows must be complete groups.
    fn add_matrix(&mut self, device: &Device, elements: usize, scale: f64) -> Result<()> {
        let Some(packing) = self.shape.packing else {
            return self.add(device, elements, scale);
        };
        let (element, Packing { bits, group }) = (self.shape.element, packing);
        let mut codes = device.allocate(elements * bits / 8)?;
        let mut scales = device.allocate(2 * elements / group)?;
        let mut biases = device.allocate(2 * elements / group)?;
        let mut numbers = Vec::new();
        if let Some(random) = &mut self.random {
            let most = (1 << bits) - 1;
            let mut bytes = vec![0u8; elements * bits / 8];
            let (mut all_scales, mut all_biases) = (Vec::new(), Vec::new());
            for of_group in 0..elements / group {
                // With this scale, uniformly distributed codes have about the same range of values as the
                // normally distributed elements of plain matrices.
                let step = scale * 3.5 / f64::from(most) * (0.75 + 0.25 * random.next().abs());
                let step = rounded(element, step);
                let bias = -step * f64::from(most) / 2.0 * (1.0 + 0.1 * random.next());
                let bias = rounded(element, bias);
                for i in of_group * group..(of_group + 1) * group {
                    let code = (random.next().abs() * 1e6) as i32 & most;
                    bytes[i * bits / 8] |= (code as u8) << (i * bits % 8);
                    // The kernels round unpacked numbers.
                    numbers.push(rounded(element, step * f64::from(code) + bias));
                }
                all_scales.push(step);
                all_biases.push(bias);
            }
            codes.write(0, &bytes)?;
            scales.write(0, &to_bytes(element, &all_scales))?;
            biases.write(0, &to_bytes(element, &all_biases))?;
        }
        let groups = Some((packing, [scales, biases]));
        self.weights.push(Matrix { memory: codes, groups, numbers });
        Ok(())
    }

    /// Returns the numbers at an address.
    pub fn numbers(&self, address: Address) -> &[f64] {
        let found = self.weights.iter().find(|weight| weight.memory.address() == address);
        found.map_or(&[], |weight| &weight.numbers)
    }

    /// Returns the numbers of a weight. Those of a packed weight are its unpacked values.
    pub fn numbers_of(&self, weight: Weight) -> &[f64] {
        let (Weight::Plain(address) | Weight::Packed(PackedWeight { codes: address, .. })) = weight;
        self.numbers(address)
    }

    fn at(&self, index: usize) -> Address {
        self.weights[index].memory.address()
    }

    fn pool(&self, index: usize) -> Pool {
        Pool { rows: PoolRows::Plain(self.pools[index].address()), capacity: self.shape.capacity }
    }

    /// Returns the plan of a step. With `spread` each launch has a separate buffer, so that all results can
    /// be read afterwards.
    pub fn plan(&self, tokens: usize, spread: bool, last_row: bool) -> Plan {
        let Shape { hidden, n_q, n_kv, head_dim, intermediate, vocabulary, .. } = self.shape;
        let outputs = (n_q + 2 * n_kv) * head_dim;
        let mut buffers = Buffers { sizes: Vec::new(), spread, shared: Vec::new() };
        let mut launches = Vec::new();
        let norm = |weight| Some(Norm { weight: Some(weight), wide: false, eps: 1e-5 });
        let mut x = buffers.take(0, tokens * hidden);
        let table = self.weights[0].weight();
        let embed = Embed { table, scale: None, vocabulary, inner: hidden, out: x };
        launches.push(Launch::Embed(embed));
        for layer in 0..self.shape.layers {
            let at = |index| self.at(1 + EACH * layer + index);
            let weight = |index: usize| self.weights[1 + EACH * layer + index].weight();
            let (keys, values) = (self.pool(2 * layer), self.pool(2 * layer + 1));
            let periods = self.shape.rotates.then(|| self.at(self.weights.len() - 1));
            let heads =
                Heads { group: 0, n_q, n_kv, head_dim, periods, rotated: head_dim, keys, values };
            let q = buffers.take(1, tokens * n_q * head_dim);
            launches.push(Launch::Product(Product {
                bias: self.shape.bias.then(|| at(BIAS)),
                norm: norm(at(NORM)),
                heads: Some(heads),
                ..Product::plain(x, weight(QKV), hidden, outputs, q)
            }));
            let attended = buffers.take(2, tokens * n_q * head_dim);
            let (group, scale, out) = (0, 1.0 / (head_dim as f32).sqrt(), attended);
            let attend = Attend { group, q, keys, values, n_q, n_kv, head_dim, scale, out };
            launches.push(Launch::Attend(attend));
            let next = buffers.take(0, tokens * hidden);
            launches.push(Launch::Product(Product {
                residual: Some(x),
                ..Product::plain(attended, weight(O), n_q * head_dim, hidden, next)
            }));
            x = next;
            let gated = buffers.take(3, tokens * intermediate);
            launches.push(Launch::Product(Product {
                norm: norm(at(NORM_2)),
                gate: Some(Gate::Silu),
                ..Product::plain(x, weight(GATE_UP), hidden, intermediate, gated)
            }));
            let next = buffers.take(0, tokens * hidden);
            launches.push(Launch::Product(Product {
                residual: Some(x),
                ..Product::plain(gated, weight(DOWN), intermediate, hidden, next)
            }));
            x = next;
        }
        let rows = if last_row { 1 } else { tokens };
        let logits = buffers.take(4, rows * vocabulary);
        let end = 1 + EACH * self.shape.layers;
        launches.push(Launch::Product(Product {
            last_row,
            norm: norm(self.at(end)),
            ..Product::plain(x, self.weights[end + 1].weight(), hidden, vocabulary, logits)
        }));
        let (buffer, copied, chosen) = (logits, CopiedRows::All, true);
        Plan {
            logits: Some(Logits { buffer, rows, vocabulary, copied, chosen }),
            overlap: false,
            ..Plan::new(self.shape.element, tokens, buffers.sizes, launches)
        }
    }
}

/// The buffers of a plan, by their use.
struct Buffers {
    sizes: Vec<usize>,
    spread: bool,
    shared: Vec<(usize, Buffer)>,
}

impl Buffers {
    fn take(&mut self, usage: usize, elements: usize) -> Buffer {
        let found = self.shared.iter().find(|(known, _)| *known == usage);
        if let (Some((_, buffer)), false) = (found, self.spread) {
            return *buffer;
        }
        let buffer = Buffer(self.sizes.len());
        self.sizes.push(elements);
        self.shared.push((usage, buffer));
        buffer
    }
}

//! Writes expressions as CUDA source text.

use std::fmt::Write;

use mlx_rs::{Array, Dtype};

use super::shape::{broadcast, Sizes};
use crate::ir::{Binary, Expression, Node, Unary};
use etkv::kernels::element;

/// The properties of an input on which the text of an expression depends.
pub type InputType = (Dtype, usize);

/// The text of an expression.
pub struct KernelText {
    /// The body of a function of `x0`, `x1`… and `out`. A thread computes an element.
    pub body: String,
    /// The dtype of the result.
    pub dtype: Dtype,
}

/// Returns the text of an expression for inputs of these types, or `None` if the expression has functions or dtypes
/// that this generator does not support.
pub fn text(expression: &Expression, inputs: &[InputType]) -> Option<KernelText> {
    let mut generator = Generator::of(expression, inputs, "x");
    let root = expression.nodes.len().checked_sub(1)?;
    let rank = generator.rank(root)?;
    let sizes: Vec<String> = (0..rank).map(|axis| generator.size(root, rank - axis)).collect();
    generator.line(format_args!("int rest = blockIdx.x * blockDim.x + threadIdx.x;"))?;
    generator.line(format_args!("const int element = rest;"))?;
    for (axis, size) in sizes.iter().enumerate().rev() {
        generator.line(format_args!("const int i{axis} = rest % {size}; rest /= {size};"))?;
    }
    generator.line(format_args!("if (rest > 0) return;"))?;
    let indices: Vec<String> = (0..rank).map(|axis| format!("i{axis}")).collect();
    let (result, dtype) = generator.value(root, &indices)?;
    let name = cuda_name(dtype)?;
    generator.line(format_args!("out[element] = static_cast<{name}>({result});"))?;
    Some(KernelText { body: generator.body, dtype })
}

/// Returns the text of a function that returns an element of an expression's result. Inputs are named `prefix` and a
/// number. `indices` are variables or numbers, one for each axis. Returns `None` if this generator does not support
/// the expression, or if its result has another number of axes.
pub fn function(
    expression: &Expression,
    inputs: &[InputType],
    prefix: &str,
    indices: &[&str],
) -> Option<String> {
    let mut generator = Generator::of(expression, inputs, prefix);
    let root = expression.nodes.len().checked_sub(1)?;
    if generator.rank(root)? != indices.len() {
        return None;
    }
    let indices: Vec<String> = indices.iter().map(|&index| index.to_owned()).collect();
    let (result, _) = generator.value(root, &indices)?;
    generator.line(format_args!("return {result};"))?;
    Some(generator.body)
}

/// Returns the shape of an expression's result. `None` if its inputs do not fit together, or if one of them or of the
/// operations has no elements: a kernel would read past the end of an empty half of a concatenation.
pub fn shape(expression: &Expression, inputs: &[&Array]) -> Option<Sizes> {
    let mut shapes: Vec<Sizes> = Vec::with_capacity(expression.nodes.len());
    for node in &expression.nodes {
        let shape: Sizes = match *node {
            Node::Input(index) => Sizes::from_slice(inputs.get(index)?.shape()),
            Node::Unary(_, x) | Node::AsType(x, _) => shapes.get(x)?.clone(),
            Node::Binary(_, a, b) => broadcast(shapes.get(a)?, shapes.get(b)?)?,
            Node::Concatenate([a, b], axis) => {
                let (mut joined, other) = (shapes.get(a)?.clone(), shapes.get(b)?);
                let last = joined.len().checked_sub(1)?;
                let is_last = axis == -1 || usize::try_from(axis) == Ok(last);
                if !is_last || joined[..last] != *other.get(..last)? || other.len() != joined.len()
                {
                    return None;
                }
                joined[last] = joined[last].checked_add(other[last])?;
                joined
            }
        };
        if shape.contains(&0) {
            return None;
        }
        shapes.push(shape);
    }
    shapes.pop()
}

struct Generator<'a> {
    expression: &'a Expression,
    inputs: &'a [InputType],
    /// The names of inputs begin with this text.
    prefix: &'a str,
    body: String,
    n_variables: usize,
}

impl<'a> Generator<'a> {
    fn of(expression: &'a Expression, inputs: &'a [InputType], prefix: &'a str) -> Self {
        Self { expression, inputs, prefix, body: String::new(), n_variables: 0 }
    }

    fn line(&mut self, line: std::fmt::Arguments) -> Option<()> {
        self.body.write_fmt(line).ok()?;
        self.body.push('\n');
        Some(())
    }

    fn rank(&self, node: usize) -> Option<usize> {
        Some(match *self.expression.nodes.get(node)? {
            Node::Input(index) => self.inputs.get(index)?.1,
            Node::Unary(_, x) | Node::AsType(x, _) | Node::Concatenate([x, _], _) => {
                self.rank(x)?
            }
            Node::Binary(_, a, b) => self.rank(a)?.max(self.rank(b)?),
        })
    }

    /// Returns the size of a node along an axis, counted from the end and from 1.
    fn size(&self, node: usize, from_end: usize) -> String {
        match self.expression.nodes[node] {
            Node::Input(index) => match self.inputs[index].1.checked_sub(from_end) {
                Some(axis) => format!("{}{index}_shape[{axis}]", self.prefix),
                None => String::from("1"),
            },
            Node::Unary(_, x) | Node::AsType(x, _) => self.size(x, from_end),
            Node::Binary(_, a, b) => match [a, b].map(|node| self.size(node, from_end)) {
                [a, b] if a == b || b == "1" => a,
                [a, b] if a == "1" => b,
                [a, b] => format!("etkv::broadcast_size({a}, {b})"),
            },
            Node::Concatenate([a, b], _) if from_end == 1 => {
                format!("({} + {})", self.size(a, 1), self.size(b, 1))
            }
            Node::Concatenate([a, _], _) => self.size(a, from_end),
        }
    }

    /// Computes a node at the given indices, one for each axis of the result. Returns the dtype of the node, and the
    /// variable: a float whose value the dtype can hold.
    fn value(&mut self, node: usize, indices: &[String]) -> Option<(String, Dtype)> {
        let (value, dtype) = match self.expression.nodes[node] {
            Node::Input(index) => {
                let (dtype, rank) = *self.inputs.get(index)?;
                cuda_name(dtype)?;
                let (mut at, name) = (String::from("0"), format!("{}{index}", self.prefix));
                for axis in 0..rank {
                    let i = indices.get((axis + indices.len()).checked_sub(rank)?)?;
                    at += &format!(
                        " + ({name}_shape[{axis}] == 1 ? 0 : {i} * static_cast<long long>({name}_strides[{axis}]))"
                    );
                }
                (format!("static_cast<float>({name}[{at}])"), dtype)
            }
            Node::Unary(function, x) => {
                let (x, dtype) = self.value(x, indices)?;
                (format!("{}({x})", unary_name(function)?), dtype)
            }
            Node::Binary(function, a, b) => {
                let ((a, first), (b, second)) = (self.value(a, indices)?, self.value(b, indices)?);
                (binary_text(function, &a, &b)?, common(first, second))
            }
            Node::AsType(x, dtype) => (self.value(x, indices)?.0, dtype),
            Node::Concatenate([a, b], _) => return self.joined([a, b], indices),
        };
        let name = self.variable();
        match cuda_name(dtype)? {
            "float" => self.line(format_args!("const float {name} = {value};"))?,
            half => {
                self.line(format_args!("const float {name} = etkv::rounded<{half}>({value});"))?
            }
        }
        Some((name, dtype))
    }

    fn joined(&mut self, [a, b]: [usize; 2], indices: &[String]) -> Option<(String, Dtype)> {
        let (size, name, first) = (self.size(a, 1), self.variable(), self.variable());
        let (last, leading) = indices.split_last()?;
        self.line(format_args!("float {name};"))?;
        self.line(format_args!("const int {first} = {size};"))?;
        self.line(format_args!("if ({last} < {first}) {{"))?;
        let (value, one) = self.value(a, indices)?;
        self.line(format_args!("{name} = {value};"))?;
        self.line(format_args!("}} else {{"))?;
        let shifted = self.variable();
        self.line(format_args!("const int {shifted} = {last} - {first};"))?;
        let mut indices = leading.to_vec();
        indices.push(shifted);
        let (value, other) = self.value(b, &indices)?;
        self.line(format_args!("{name} = {value};"))?;
        self.line(format_args!("}}"))?;
        Some((name, common(one, other)))
    }

    fn variable(&mut self) -> String {
        self.n_variables += 1;
        format!("v{}", self.n_variables)
    }
}

/// Returns the dtype of a function of two float dtypes, as MLX promotes them.
fn common(a: Dtype, b: Dtype) -> Dtype {
    if a == b {
        a
    } else {
        Dtype::Float32
    }
}

fn cuda_name(dtype: Dtype) -> Option<&'static str> {
    element(dtype).map(|(name, _)| name)
}

fn unary_name(function: Unary) -> Option<&'static str> {
    Some(match function {
        Unary::Abs => "fabsf",
        Unary::Cos => "cosf",
        Unary::Erf => "erff",
        Unary::Exp => "expf",
        Unary::Expm1 => "expm1f",
        Unary::Gelu => "etkv::gelu",
        Unary::GeluTanh => "etkv::gelu_tanh",
        Unary::Log => "logf",
        Unary::Log1p => "log1pf",
        Unary::Neg => "-",
        Unary::Reciprocal => "1.0f / ",
        Unary::Rsqrt => "rsqrtf",
        Unary::Sigmoid => "etkv::sigmoid",
        Unary::Silu => "etkv::silu",
        Unary::Sin => "sinf",
        Unary::Sqrt => "sqrtf",
        Unary::Square => "etkv::square",
        Unary::Tanh => "tanhf",
        _ => return None,
    })
}

/// Returns whether this generator supports a function, so that expressions may have it.
pub fn supports_unary(function: Unary) -> bool {
    unary_name(function).is_some()
}

/// As [`supports_unary`].
pub fn supports_binary(function: Binary) -> bool {
    binary_text(function, "", "").is_some()
}

fn binary_text(function: Binary, a: &str, b: &str) -> Option<String> {
    Some(match function {
        Binary::Add => format!("{a} + {b}"),
        Binary::Subtract => format!("{a} - {b}"),
        Binary::Multiply => format!("{a} * {b}"),
        Binary::Divide => format!("{a} / {b}"),
        Binary::LogAddExp => format!("etkv::log_add_exp({a}, {b})"),
        Binary::Maximum => format!("etkv::maximum({a}, {b})"),
        Binary::Minimum => format!("etkv::minimum({a}, {b})"),
        _ => return None,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn expression(nodes: &[Node]) -> Expression {
        Expression { nodes: nodes.to_vec() }
    }

    #[test]
    fn a_text_computes_in_the_dtypes_of_the_operations() {
        let nodes = [
            Node::Input(0),
            Node::AsType(0, Dtype::Float32),
            Node::Input(1),
            Node::Binary(Binary::Add, 1, 2),
            Node::AsType(3, Dtype::Bfloat16),
        ];
        let made = text(&expression(&nodes), &[(Dtype::Bfloat16, 2), (Dtype::Float32, 1)]).unwrap();
        assert_eq!(made.dtype, Dtype::Bfloat16);
        let lines: Vec<&str> = made.body.lines().collect();
        assert_eq!(
            lines,
            [
                "int rest = blockIdx.x * blockDim.x + threadIdx.x;",
                "const int element = rest;",
                "const int i1 = rest % etkv::broadcast_size(x0_shape[1], x1_shape[0]); \
                 rest /= etkv::broadcast_size(x0_shape[1], x1_shape[0]);",
                "const int i0 = rest % x0_shape[0]; rest /= x0_shape[0];",
                "if (rest > 0) return;",
                "const float v1 = etkv::rounded<__nv_bfloat16>(static_cast<float>(x0[0 \
                 + (x0_shape[0] == 1 ? 0 : i0 * static_cast<long long>(x0_strides[0])) \
                 + (x0_shape[1] == 1 ? 0 : i1 * static_cast<long long>(x0_strides[1]))]));",
                "const float v2 = v1;",
                "const float v3 = static_cast<float>(x1[0 \
                 + (x1_shape[0] == 1 ? 0 : i1 * static_cast<long long>(x1_strides[0]))]);",
                "const float v4 = v2 + v3;",
                "const float v5 = etkv::rounded<__nv_bfloat16>(v4);",
                "out[element] = static_cast<__nv_bfloat16>(v5);",
            ]
        );
    }

    #[test]
    fn a_function_returns_the_element_at_given_indices() {
        let expression = expression(&[Node::Input(0), Node::Unary(Unary::Sigmoid, 0)]);
        let types = [(Dtype::Float16, 2)];
        let expected = "const float v1 = etkv::rounded<__half>(static_cast<float>(b0[0 \
             + (b0_shape[0] == 1 ? 0 : token * static_cast<long long>(b0_strides[0])) \
             + (b0_shape[1] == 1 ? 0 : 2 * static_cast<long long>(b0_strides[1]))]));\n\
             const float v2 = etkv::rounded<__half>(etkv::sigmoid(v1));\nreturn v2;\n";
        let made = function(&expression, &types, "b", &["token", "2"]);
        assert_eq!(made.as_deref(), Some(expected));
        assert_eq!(function(&expression, &types, "b", &["token"]), None);
    }

    #[test]
    fn shapes_are_those_of_mlx() {
        let array = |shape: &[i32]| Array::zeros::<f32>(shape).unwrap();
        let sum = expression(&[Node::Input(0), Node::Input(1), Node::Binary(Binary::Add, 0, 1)]);
        let of = |expression: &Expression, a: &[i32], b: &[i32]| {
            shape(expression, &[&array(a), &array(b)]).map(|shape| shape.to_vec())
        };
        assert_eq!(of(&sum, &[2, 1, 3], &[4, 1]), Some(vec![2, 4, 3]));
        assert_eq!(of(&sum, &[], &[4]), Some(vec![4]));
        assert_eq!(of(&sum, &[2], &[3]), None);
        for axis in [-1, 1] {
            let nodes = [Node::Input(0), Node::Input(1), Node::Concatenate([0, 1], axis)];
            assert_eq!(of(&expression(&nodes), &[2, 3], &[2, 1]), Some(vec![2, 4]));
            assert_eq!(of(&expression(&nodes), &[2, 3], &[1, 3]), None);
            assert_eq!(of(&expression(&nodes), &[2, 3], &[2, 0]), None);
            assert_eq!(of(&expression(&nodes), &[1, 2, 3], &[1, 2, 3]).is_some(), axis == -1);
        }
    }

    #[test]
    fn a_concatenation_reads_the_second_half_at_shifted_indices() {
        let nodes = [Node::Input(0), Node::Input(1), Node::Concatenate([0, 1], -1)];
        let made = text(&expression(&nodes), &[(Dtype::Float32, 1); 2]).unwrap();
        let expected = [
            "const int i0 = rest % (x0_shape[0] + x1_shape[0]); rest /= (x0_shape[0] + x1_shape[0]);",
            "const int v2 = x0_shape[0];",
            "if (i0 < v2) {",
            "const int v4 = i0 - v2;",
            "(x1_shape[0] == 1 ? 0 : v4 * static_cast<long long>(x1_strides[0]))",
            "out[element] = static_cast<float>(v1);",
        ];
        for line in expected {
            assert!(made.body.contains(line), "{line} in {}", made.body);
        }
    }

    #[test]
    fn other_dtypes_and_functions_have_no_text() {
        let nodes = [Node::Input(0), Node::Unary(Unary::Neg, 0)];
        assert!(text(&expression(&nodes), &[(Dtype::Int32, 1)]).is_none());
        let nodes = [Node::Input(0), Node::Unary(Unary::Arccos, 0)];
        assert!(text(&expression(&nodes), &[(Dtype::Float32, 1)]).is_none());
    }
}

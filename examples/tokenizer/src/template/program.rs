//! A template as instructions, with calls of the checks of `bounds` and of Python's operators.
//!
//! minijinja compiles a template to instructions for a stack machine. [`compiled`] inserts calls of functions, or
//! replaces instructions by them:
//!
//! | instruction | change | reason |
//! | --- | --- | --- |
//! | `a % b`, `a ~ b`, `y[a:b:c]` | replaced by a call | minijinja's `%` does not format text, its `~` prints values as Rust does, and its slices with negative steps end elsewhere |
//! | `for x in y` | a call before it | minijinja iterates over None, and does not know the length of a text |
//! | text of the template | written as a value | all output is counted in one place |
//! | other operators, filters, methods, calls | a call before it | its operands are checked |
//! | operations with a result of any size | a call after it | the result is checked |
//!
//! The names of these functions are not identifiers, so that no template can call or replace them.

use std::collections::BTreeMap;

use minijinja::machinery::{parse, CodeGenerator, Instruction, Instructions};
use minijinja::{Error, ErrorKind, Value};

use super::environment::syntax;

/// Returns the value that a loop iterates over, as a list if minijinja does not know its length.
pub const ITER: &str = "for";

/// Returns `value[start:stop:step]`.
pub const SLICE: &str = "[:]";

/// Returns `left % right`.
pub const PERCENT: &str = "%";

/// Returns `left ~ right`.
pub const CONCAT: &str = "~";

/// Returns its argument, the result of an operation, unless it is too large.
pub const RESULT: &str = "=";

/// Names of functions that return the operands of an operator as a list, or an error if the operator would exceed the
/// budget.
pub const ADD: &str = "+";
pub const TIMES: &str = "*";
pub const COMPARE: &str = "==";
pub const IN: &str = " in ";
pub const INDEX: &str = "[]";
pub const CONTAINER: &str = "[,]";
pub const MAPPING: &str = "{,}";
pub const SPREAD: &str = "**";
pub const SET: &str = ". =";
pub const CALL: &str = "()";

/// The maximum items of a list literal.
const MAX_SPELLED: usize = u16::MAX as usize;

/// A template and its blocks.
pub struct Program<'a> {
    pub instructions: Instructions<'a>,
    pub blocks: BTreeMap<&'a str, Instructions<'a>>,
}

/// Compiles a template.
pub fn compiled<'a>(source: &'a str) -> Result<Program<'a>, Error> {
    let tree = parse(source, "template", syntax()?)?;
    let mut generator = CodeGenerator::new("template", source);
    generator.compile_stmt(&tree);
    let (instructions, blocks) = generator.finish();
    Ok(Program { instructions, blocks })
}

impl Program<'_> {
    /// Returns the checks of the filters, tests, methods and functions that the template uses.
    pub fn checks(&self) -> Vec<Check> {
        let all = self.blocks.values().chain([&self.instructions]).flat_map(each);
        let mut checks: Vec<Check> = all
            .filter_map(|instruction| match *instruction {
                Instruction::ApplyFilter(name, ..) => Some(Check::of(Kind::Filter, name)),
                Instruction::PerformTest(name, ..) => Some(Check::of(Kind::Test, name)),
                Instruction::CallMethod(name, _) => Some(Check::of(Kind::Method, name)),
                Instruction::CallFunction(name, _) => Some(Check::of(Kind::Function, name)),
                _ => None,
            })
            .collect();
        checks.sort();
        checks.dedup();
        checks
    }

    /// Returns the program with checks inserted. `checks` are those of [`Program::checks`].
    pub fn checked<'b>(&'b self, checks: &'b [Check]) -> Result<Program<'b>, Error> {
        let blocks = self.blocks.iter().map(|(&name, block)| Ok((name, checked(block, checks)?)));
        Ok(Program {
            instructions: checked(&self.instructions, checks)?,
            blocks: blocks.collect::<Result<_, Error>>()?,
        })
    }
}

#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Kind {
    Filter,
    Test,
    Method,
    Function,
}

/// A function that checks the operands of a filter, a test, a method or a function.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct Check {
    pub kind: Kind,
    /// The filter, test, method or function that the template calls.
    pub name: String,
    /// The name of the function.
    pub function: String,
}

impl Check {
    fn of(kind: Kind, name: &str) -> Self {
        let function = match kind {
            Kind::Filter => format!("|{name}"),
            Kind::Test => format!(" is {name}"),
            Kind::Method => format!(".{name}"),
            Kind::Function => format!("{name}()"),
        };
        Self { kind, name: name.to_owned(), function }
    }
}

fn each<'b, 'a>(all: &'b Instructions<'a>) -> impl Iterator<Item = &'b Instruction<'a>> {
    (0..).map_while(|n| all.get(n))
}

fn checked<'b>(all: &'b Instructions<'_>, checks: &'b [Check]) -> Result<Instructions<'b>, Error> {
    let mut made = Instructions::new(all.name(), all.source());
    // The new index of each instruction. If checks precede the instruction, the new index is that of the checks, so
    // that jumps lead to the checks.
    let mut places = Vec::new();
    let mut length = 0;
    for (n, instruction) in each(all).enumerate() {
        places.push(length);
        let line = all.get_line(n as u32).unwrap_or_default() as u16;
        for one in with_checks(instruction, checks)? {
            length = made.add_with_line(one, line) + 1;
        }
    }
    places.push(length);
    for n in 0.. {
        let Some(instruction) = made.get_mut(n) else {
            break;
        };
        use Instruction::{
            BuildMacro, Iterate, Jump, JumpIfFalse, JumpIfFalseOrPop, JumpIfTrueOrPop,
        };
        if let Jump(to)
        | JumpIfFalse(to)
        | JumpIfFalseOrPop(to)
        | JumpIfTrueOrPop(to)
        | Iterate(to)
        | BuildMacro(_, to, _) = instruction
        {
            *to = places[*to as usize];
        }
    }
    Ok(made)
}

/// Returns the instructions that replace `instruction`.
fn with_checks<'b>(
    instruction: &'b Instruction<'_>,
    checks: &'b [Check],
) -> Result<Vec<Instruction<'b>>, Error> {
    use Instruction as I;
    let call = |name: &'b str, n: usize| I::CallFunction(name, u16::try_from(n).ok());
    // The check returns the operands as a list. The list is then unpacked to the stack, followed by its length.
    let before = |name: &'b str, n: usize, then: I<'b>| {
        vec![call(name, n), I::UnpackLists(1), I::DiscardTop, then]
    };
    let around = |name: &'b str, n: Option<u16>, then: I<'b>| {
        vec![I::CallFunction(name, n), I::UnpackLists(1), then, call(RESULT, 1)]
    };
    let named = |kind: Kind, name: &str| -> &'b str {
        let known =
            checks.binary_search_by(|check| (check.kind, check.name.as_str()).cmp(&(kind, name)));
        known.map_or("", |n| checks[n].function.as_str())
    };
    let spelled = |n: usize| match n > MAX_SPELLED {
        true => Err(Error::new(
            ErrorKind::InvalidOperation,
            format!("a list of {n} items, the maximum is {MAX_SPELLED}"),
        )),
        false => Ok(n),
    };
    let same = instruction.clone();
    Ok(match *instruction {
        I::EmitRaw(text) => vec![I::LoadConst(Value::from(text)), I::Emit],
        I::Rem => vec![call(PERCENT, 2)],
        I::StringConcat => vec![call(CONCAT, 2)],
        I::Slice => vec![call(SLICE, 4)],
        I::PushLoop(_) => vec![call(ITER, 1), same],
        I::Add => before(ADD, 2, same),
        I::Mul => {
            let mut made = before(TIMES, 2, same);
            made.push(call(RESULT, 1));
            made
        }
        I::Eq | I::Ne | I::Gt | I::Gte | I::Lt | I::Lte => before(COMPARE, 2, same),
        I::In => before(IN, 2, same),
        // `a < b < c` or `a in b in c`. A search takes at least as many units as a comparison.
        I::CompareAndPreserve(_) => before(IN, 2, same),
        I::GetItem => before(INDEX, 2, same),
        I::Include(_) | I::LoadBlocks => {
            let reason = "a template cannot read others";
            return Err(Error::new(ErrorKind::InvalidOperation, reason));
        }
        I::SetAttr(_) => before(SET, 2, same),
        I::BuildList(Some(n)) | I::BuildTuple(Some(n)) if n > 0 => {
            before(CONTAINER, spelled(n)?, same)
        }
        I::BuildMap(n) if n > 0 => before(MAPPING, spelled(2 * n)?, same),
        I::BuildKwargs(n) if n > 0 => before(SPREAD, spelled(2 * n)?, same),
        I::MergeKwargs(n) | I::UnpackLists(n) if n > 0 => before(SPREAD, spelled(n)?, same),
        I::ApplyFilter(name, n, id) => {
            around(named(Kind::Filter, name), n, I::ApplyFilter(name, None, id))
        }
        I::PerformTest(name, n, id) => {
            let check = I::CallFunction(named(Kind::Test, name), n);
            vec![check, I::UnpackLists(1), I::PerformTest(name, None, id)]
        }
        I::CallMethod(name, n) => around(named(Kind::Method, name), n, I::CallMethod(name, None)),
        // A range is lazy, as small as its bounds.
        I::CallFunction("range", _) => vec![same],
        I::CallFunction(name, n) => {
            around(named(Kind::Function, name), n, I::CallFunction(name, None))
        }
        I::CallObject(n) => around(CALL, n, I::CallObject(None)),
        I::EndCapture => vec![same, call(RESULT, 1)],
        _ => vec![same],
    })
}

//! PTX text as a [`Module`]: a reader of plain kernels.
//!
//! It reads one module of kernels with scalar parameters, registers of every class, static shared memory, and the
//! instructions that need no description of their own: arithmetic, comparisons, conversions, branches, loads and stores,
//! shuffles and block barriers. Anything else is refused with its line, never guessed at. The module then goes through
//! the same checks as a kernel that was built here.
//!
//! ```
//! let text = ".version 7.0 .target sm_80 .address_size 64
//!     .visible .entry empty() { .reg .b32 %r<2>; mov.u32 %r1, %tid.x; ret; }";
//! let module = flashcore_ptx::read::module(text)?;
//! assert_eq!(module.kernel("empty").unwrap().body.len(), 2);
//!
//! let error = flashcore_ptx::read::module(&text.replace("%tid.x", "0f3F8")).unwrap_err();
//! assert!(error.to_string().contains("line 2: 'mov.u32 %r1, 0f3F8'"));
//! # Ok::<(), flashcore_ptx::read::ReadError>(())
//! ```

mod instructions;
mod operands;
mod source;
mod tokens;

use std::collections::HashMap;
use std::sync::Arc;

use crate::check;
use crate::error::BuildError;
use crate::flow;
use crate::inst::{Inst, LabelId, Op};
use crate::modifiers::Special;
use crate::module::{Kernel, Module, RegInfo, Threads};
use crate::params::{ParamType, layout};
use crate::shared::SharedLayout;
use crate::types::{Guard, IsaVersion, Reg, RegClass, RegId, Target};
use instructions::Parts;
use operands::Operands;
use source::{Source, unexpected};
use tokens::{Token, Tokens, integer};

/// The most bytes of a text: anything longer was neither written by a person nor made by a compiler.
const MOST_TEXT: usize = 16 << 20;

/// The most bytes of shared memory that a text can declare; a launch can give more, without a name.
const MOST_STATIC_SHARED: u32 = 48 << 10;

/// The most registers that a kernel can declare.
const MOST_REGISTERS: usize = 1 << 16;

/// The most instructions and labels of a kernel.
const MOST_INSTRUCTIONS: usize = 1 << 17;

/// The most labels and branches times registers: the checker keeps facts for each pair.
const MOST_PAIRS: usize = 1 << 24;

/// The most characters of a message.
const MOST_WORDS: usize = 500;

/// Why a text is refused.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum ReadError {
    /// Something that is not PTX, or PTX that is not read here.
    #[error("line {line}: {what}")]
    At {
        /// The line of the text.
        line: usize,
        /// What is wrong with it.
        what: String,
    },
    /// A kernel that the checker refuses; its instructions are named by their lines.
    #[error("{0}")]
    Checked(Box<BuildError>),
}

/// An error at a line. What it quotes of the text is cut to a readable length.
fn at(line: usize, what: impl Into<String>) -> ReadError {
    let mut what = what.into();
    if let Some((end, _)) = what.char_indices().nth(MOST_WORDS) {
        what.truncate(end);
        what.push_str(" ...");
    }
    ReadError::At { line, what }
}

/// Reads a module.
pub fn module(text: &str) -> Result<Module, ReadError> {
    if text.len() > MOST_TEXT {
        let what = format!("the text has {} bytes; {MOST_TEXT} is the most that is read", text.len());
        return Err(at(1, what));
    }
    let mut source = Source { tokens: Tokens::new(text) };
    let version = source.version()?;
    let target = source.target(version)?;
    let mut module = Module { version, ..Module::new(target) };
    let mut address_size = false;
    while let Some(token) = source.peek()? {
        let line = source.line()?;
        match token {
            Token::Dot("address_size") if !address_size && module.kernels.is_empty() => {
                source.next()?;
                address_size = true;
                if source.number("64")? != 64 {
                    return Err(at(line, "addresses of 64 bits are needed: .address_size 64"));
                }
            }
            Token::Dot("visible" | "weak" | "entry") => {
                if token != Token::Dot("entry") {
                    source.next()?;
                }
                source.dot("entry")?;
                module = module.with(read_kernel(&mut source, version, target)?);
            }
            other => return Err(at(line, format!("{} is not read here: a kernel (.entry) is", word(other)))),
        }
    }
    if module.kernels.is_empty() {
        return Err(at(source.line()?, "there is no kernel in it (.visible .entry)"));
    }
    match check::module(&module).into_iter().next() {
        Some(error) => Err(ReadError::Checked(Box::new(error))),
        None => Ok(module),
    }
}

/// A token as a message shows it.
fn word(token: Token<'_>) -> String {
    match token {
        Token::Name(text) | Token::Number(text) => format!("'{text}'"),
        Token::Dot(text) => format!("'.{text}'"),
        Token::Mark(mark) => format!("'{mark}'"),
    }
}

/// What a name of a kernel stands for.
#[derive(Clone, Copy)]
enum Symbol {
    Register(RegId, RegClass),
    Shared(u32),
    Param(u32),
    Label,
}

/// A kernel that is being read.
struct Reader<'a> {
    kernel: Kernel,
    version: IsaVersion,
    target: Target,
    symbols: HashMap<String, Symbol>,
    labels: HashMap<&'a str, LabelId>,
    /// How many registers of each class there are.
    counts: HashMap<RegClass, u32>,
    /// Labels and branches.
    joints: usize,
}

/// `.reqntid` and similar: up to three numbers.
fn dimensions(source: &mut Source<'_>) -> Result<[u32; 3], ReadError> {
    let mut dims = [1; 3];
    for (d, dim) in dims.iter_mut().enumerate() {
        if d == 0 || source.takes(',')? {
            *dim = source.positive("a number of threads")?;
        }
    }
    Ok(dims)
}

fn read_kernel(source: &mut Source<'_>, version: IsaVersion, target: Target) -> Result<Kernel, ReadError> {
    let line = source.line()?;
    let name = source.name("the kernel's name")?.to_owned();
    let mut reader = Reader {
        kernel: Kernel {
            name,
            params: Vec::new(),
            regs: Vec::new(),
            shared: SharedLayout::new(),
            threads: None,
            min_blocks_per_sm: None,
            cluster: None,
            max_regs: None,
            sections: Vec::new(),
            labels: Vec::new(),
            body: Vec::new(),
        },
        version,
        target,
        symbols: HashMap::new(),
        labels: HashMap::new(),
        counts: HashMap::new(),
        joints: 0,
    };
    reader.parameters(source)?;
    reader.directives(source)?;
    source.mark('{')?;
    while !source.takes('}')? {
        reader.item(source)?;
    }
    if reader.joints.saturating_mul(reader.kernel.regs.len()) > MOST_PAIRS {
        let what = format!(
            "a kernel of {} labels and branches and {} registers is too large to be checked",
            reader.joints,
            reader.kernel.regs.len()
        );
        return Err(at(line, what));
    }
    let mut kernel = reader.kernel;
    let (name, shared) = (&kernel.name, kernel.shared_bytes());
    if let Err(error) = kernel.shared.fits(target) {
        return Err(at(line, format!("kernel `{name}`: {error}")));
    }
    if shared > MOST_STATIC_SHARED {
        let what = format!(
            "kernel `{name}` declares {shared} bytes of shared memory; {MOST_STATIC_SHARED} is the most"
        );
        return Err(at(line, what));
    }
    flow::set_reconvergence(&mut kernel);
    Ok(kernel)
}

/// The type of a parameter.
fn param_type(ty: &str) -> Option<ParamType> {
    Some(match ty {
        "u64" | "b64" => ParamType::U64,
        "s64" => ParamType::S64,
        "u32" | "b32" => ParamType::U32,
        "s32" => ParamType::S32,
        "f32" => ParamType::F32,
        _ => return None,
    })
}

/// The class of registers that are declared with a type.
fn register_class(ty: &str) -> Option<RegClass> {
    Some(match ty {
        "pred" => RegClass::Pred,
        "b16" | "u16" | "s16" | "f16" => RegClass::B16,
        "b32" | "u32" | "s32" | "f16x2" => RegClass::B32,
        "b64" | "u64" | "s64" => RegClass::B64,
        "f32" => RegClass::F32,
        _ => return None,
    })
}

/// The bytes of an element of shared memory.
fn element_bytes(ty: &str) -> Option<u32> {
    Some(match ty {
        "b8" | "u8" | "s8" => 1,
        "b16" | "u16" | "s16" | "f16" => 2,
        "b32" | "u32" | "s32" | "f32" | "f16x2" => 4,
        "b64" | "u64" | "s64" | "f64" => 8,
        _ => return None,
    })
}

impl<'a> Reader<'a> {
    fn parameters(&mut self, source: &mut Source<'a>) -> Result<(), ReadError> {
        let mut fields: Vec<(&str, ParamType)> = Vec::new();
        source.mark('(')?;
        while !source.takes(')')? {
            if !fields.is_empty() {
                source.mark(',')?;
            }
            source.dot("param")?;
            let line = source.line()?;
            let ty = match source.some("a parameter's type")? {
                (_, Token::Dot(ty)) => param_type(ty)
                    .ok_or_else(|| at(line, format!("a parameter of the type .{ty} is not read here")))?,
                (line, token) => return unexpected(line, token, "a parameter's type"),
            };
            // What a pointer points to is not needed.
            if source.peek()? == Some(Token::Dot("ptr")) {
                source.next()?;
                if matches!(source.peek()?, Some(Token::Dot("global" | "shared" | "const" | "local"))) {
                    source.next()?;
                }
                if source.peek()? == Some(Token::Dot("align")) {
                    source.next()?;
                    let line = source.line()?;
                    if !source.number("an alignment")?.is_power_of_two() {
                        return Err(at(line, "an alignment must be a power of two"));
                    }
                }
            }
            let line = source.line()?;
            let name = source.name("a parameter's name")?;
            self.declare(line, name, Symbol::Param(fields.len() as u32))?;
            fields.push((name, ty));
        }
        self.kernel.params = layout(&fields);
        Ok(())
    }

    fn directives(&mut self, source: &mut Source<'a>) -> Result<(), ReadError> {
        let mut seen: Vec<&str> = Vec::new();
        while let Some(Token::Dot(directive)) = source.peek()? {
            let line = source.line()?;
            source.next()?;
            if seen.contains(&directive) {
                return Err(at(line, format!("'.{directive}' stands twice")));
            }
            seen.push(directive);
            match directive {
                "reqntid" => self.kernel.threads = Some(Threads::Exactly(dimensions(source)?)),
                "maxntid" => self.kernel.threads = Some(Threads::AtMost(dimensions(source)?)),
                "minnctapersm" => {
                    self.kernel.min_blocks_per_sm = Some(source.positive("a number of blocks")?);
                }
                "maxnreg" => self.kernel.max_regs = Some(source.positive("a number of registers")?),
                other => return Err(at(line, format!("'.{other}' is not read here"))),
            }
        }
        if seen.contains(&"reqntid") && seen.contains(&"maxntid") {
            return Err(at(source.line()?, "a kernel has .reqntid or .maxntid, not both"));
        }
        Ok(())
    }

    /// Gives a name its meaning.
    fn declare(&mut self, line: usize, name: &str, symbol: Symbol) -> Result<(), ReadError> {
        let special = |special: &Special| special.text().split('.').next() == Some(name);
        if name == "WARP_SZ" || Special::ALL.iter().any(special) {
            return Err(at(line, format!("'{name}' is a name that PTX has already")));
        }
        match self.symbols.insert(name.to_owned(), symbol) {
            Some(_) => Err(at(line, format!("'{name}' is declared twice"))),
            None => Ok(()),
        }
    }

    /// A label, a declaration or an instruction.
    fn item(&mut self, source: &mut Source<'a>) -> Result<(), ReadError> {
        let line = source.line()?;
        if self.kernel.body.len() >= MOST_INSTRUCTIONS {
            return Err(at(line, format!("more than {MOST_INSTRUCTIONS} instructions are not read")));
        }
        match source.peek()? {
            None => return Err(at(line, format!("the kernel `{}` does not end", self.kernel.name))),
            Some(Token::Mark('{')) => return Err(at(line, "a block in braces is not read here")),
            Some(Token::Name(name)) => {
                let mut ahead = source.tokens;
                ahead.next()?;
                if ahead.next()? == Some(Token::Mark(':')) {
                    source.tokens = ahead;
                    if name.starts_with('%') {
                        return Err(at(line, format!("'{name}' names a register, not a label")));
                    }
                    self.declare(line, name, Symbol::Label)?;
                    let label = self.label(name);
                    self.push(line, None, (Op::Label(label), Vec::new(), Vec::new()));
                    return Ok(());
                }
            }
            Some(_) => {}
        }
        let (tokens, text) = source.statement()?;
        let read = match tokens[..] {
            [Token::Dot("reg"), ref rest @ ..] => self.registers(line, rest),
            [Token::Dot("shared"), ref rest @ ..] => self.allocation(line, rest),
            [Token::Dot(_), ..] => Err("is not read here".into()),
            ref tokens => self.guarded(line, tokens),
        };
        read.map_err(|what| at(line, format!("'{text}' {what}")))
    }

    /// The registers of a declaration: `.b32 %r<3>` or `.f32 %a, %b`.
    fn registers(&mut self, line: usize, tokens: &[Token<'a>]) -> Result<(), String> {
        let [Token::Dot(ty), names @ ..] = tokens else { return Err("names no type".into()) };
        let class = register_class(ty).ok_or("declares registers of a type that is not read here")?;
        let mut rest = Operands { tokens: names };
        loop {
            let Some(Token::Name(name)) = rest.next() else {
                return Err("lacks the name of a register".into());
            };
            if rest.takes('<') {
                let count = match rest.next() {
                    Some(Token::Number(text)) => integer(text),
                    _ => None,
                };
                let count = count.filter(|&count| count > 0 && rest.takes('>'));
                let count = count.ok_or("has no number of registers between '<' and '>'")?;
                for n in 0..count {
                    self.register(line, &format!("{name}{n}"), class)?;
                }
            } else {
                self.register(line, name, class)?;
            }
            match rest.next() {
                None => return Ok(()),
                Some(Token::Mark(',')) => {}
                Some(token) => return Err(format!("has {} where a comma or its end must be", word(token))),
            }
        }
    }

    fn register(&mut self, line: usize, name: &str, class: RegClass) -> Result<(), String> {
        let all = &mut self.kernel.regs;
        if all.len() >= MOST_REGISTERS {
            return Err(format!("makes more than {MOST_REGISTERS} registers, which are not read"));
        }
        let number = self.counts.entry(class).or_default();
        all.push(RegInfo { class, number: *number });
        *number += 1;
        let id = RegId(all.len() as u32 - 1);
        self.declare(line, name, Symbol::Register(id, class))
            .map_err(|_| format!("declares {name} twice, or a name of PTX"))
    }

    /// `.align 16 .b8 name[1024]`
    fn allocation(&mut self, line: usize, tokens: &[Token<'a>]) -> Result<(), String> {
        let number = |text: &str| integer(text).and_then(|number| u32::try_from(number).ok());
        let (align, tokens) = match tokens {
            [Token::Dot("align"), Token::Number(align), rest @ ..] => {
                (Some(number(align).ok_or("has an alignment that is no number")?), rest)
            }
            rest => (None, rest),
        };
        let (ty, name, count) = match tokens {
            [Token::Dot(ty), Token::Name(name)] => (*ty, *name, 1),
            [Token::Dot(ty), Token::Name(name), Token::Mark('['), Token::Number(count), Token::Mark(']')] => {
                (*ty, *name, number(count).ok_or("has a size that is no number of 32 bits")?)
            }
            _ => return Err("is not read here: .shared .align 16 .b8 name[1024] is".into()),
        };
        let size = element_bytes(ty).ok_or("has a type that is not read here")?;
        let bytes = size.checked_mul(count).filter(|&bytes| bytes > 0);
        let bytes = bytes.ok_or("has no size that shared memory can have")?;
        let shared = self.kernel.shared.alloc(name, bytes, align.unwrap_or(size));
        self.declare(line, name, Symbol::Shared(shared.index()))
            .map_err(|_| format!("declares {name} twice, or a name of PTX"))
    }

    /// An instruction with its guard.
    fn guarded(&mut self, line: usize, tokens: &[Token<'a>]) -> Result<(), String> {
        let mut rest = Operands { tokens };
        let guard = if rest.takes('@') {
            let negated = rest.takes('!');
            let Some(Token::Name(name)) = rest.next() else { return Err("is guarded by no name".into()) };
            match self.symbols.get(name) {
                Some(&Symbol::Register(id, RegClass::Pred)) => Some(Guard { reg: Reg::new(id), negated }),
                _ => return Err(format!("is guarded by {name}, which is no predicate")),
            }
        } else {
            None
        };
        let Some(Token::Name(name)) = rest.next() else { return Err("names no instruction".into()) };
        let mut words = vec![name];
        while let Some(Token::Dot(modifier)) = rest.tokens.first() {
            words.push(modifier);
            rest.next();
        }
        let parts = self.instruction(&words, &rest.all()?)?;
        let needs = parts.0.isa(self.target);
        if needs > self.version {
            return Err(format!("needs .version {needs} or later, not {}", self.version));
        }
        self.push(line, guard, parts);
        Ok(())
    }

    fn push(&mut self, line: usize, guard: Option<Guard>, (op, dst, src): Parts) {
        self.joints += usize::from(matches!(op, Op::Label(_)) || op.ends_flow());
        let comment = Some(Arc::from(format!("line {line}")));
        self.kernel.body.push(Inst { op, guard, dst, src, comment, section: None, loc: None });
    }

    fn label(&mut self, name: &'a str) -> LabelId {
        let labels = &mut self.kernel.labels;
        *self.labels.entry(name).or_insert_with(|| {
            labels.push(name.to_owned());
            LabelId(labels.len() as u32 - 1)
        })
    }
}

//! PTX text for the simulator: a reader of plain kernels.
//!
//! It reads one module of kernels with scalar parameters, registers of every class, static shared memory, and the
//! instructions that need no description of their own: arithmetic, comparisons, conversions, branches, loads and stores,
//! shuffles and block barriers. What else PTX has is refused with its line, never guessed at; the whole is then put to
//! the same checks as a kernel that was built here.

use std::collections::HashMap;
use std::panic::Location;
use std::sync::Arc;

use flashcore_ptx::params::layout;
use flashcore_ptx::{
    Alu, Arg, B16, B32, B64, CacheHint, Cmp, F32, Guard, Imm, Inst, Kernel, KernelBuilder, LabelId, MemBase,
    MemTy, Module, NumType, Op, Order, ParamType, Pred, Reg, RegClass, RegId, Shared, SharedLayout, ShflMode,
    Space, Special, Target, Width, check, flow,
};

/// Reads a module.
pub fn read(text: &str) -> Result<Module, String> {
    let text = without_comments(text);
    let mut module: Option<Module> = None;
    let mut rest = Cursor { text: &text, line: 1 };
    loop {
        rest.skip_space();
        if rest.text.is_empty() {
            break;
        }
        let line = rest.line;
        let word = rest.word();
        match word {
            ".version" => drop(rest.until_line_end()),
            ".address_size" => {
                if rest.until_line_end().trim() != "64" {
                    return Err(format!("line {line}: addresses of 64 bits are needed"));
                }
            }
            ".target" => {
                let name = rest.until_line_end().trim().to_string();
                let target = name.split(',').next().and_then(|name| Target::from_name(name.trim()));
                module =
                    Some(Module::new(target.ok_or(format!("line {line}: no target {name} is known here"))?));
            }
            ".visible" | ".weak" => {}
            ".entry" => {
                let Some(made) = module.take() else {
                    return Err(format!("line {line}: a kernel before .target"));
                };
                let kernel = read_kernel(&mut rest, made.target)?;
                module = Some(made.with(kernel));
            }
            other => return Err(format!("line {line}: '{other}' is not read here")),
        }
    }
    let module = module.filter(|module| !module.kernels.is_empty()).ok_or("there is no kernel in it")?;
    match check::module(&module).first() {
        Some(error) => Err(error.to_string()),
        None => Ok(module),
    }
}

/// The text with comments blanked out; lines stay where they are.
fn without_comments(text: &str) -> String {
    let mut plain = String::with_capacity(text.len());
    let mut rest = text;
    while let Some(at) = rest.find("//").into_iter().chain(rest.find("/*")).min() {
        plain.push_str(&rest[..at]);
        let end = if rest[at..].starts_with("//") {
            rest[at..].find('\n').map_or(rest.len(), |end| at + end)
        } else {
            rest[at..].find("*/").map_or(rest.len(), |end| at + end + 2)
        };
        plain.extend(rest[at..end].chars().filter(|&c| c == '\n'));
        rest = &rest[end..];
    }
    plain + rest
}

/// A place in the text.
struct Cursor<'a> {
    text: &'a str,
    line: usize,
}

impl<'a> Cursor<'a> {
    fn take(&mut self, bytes: usize) -> &'a str {
        let (taken, rest) = self.text.split_at(bytes);
        self.line += taken.matches('\n').count();
        self.text = rest;
        taken
    }

    fn skip_space(&mut self) {
        self.take(self.text.len() - self.text.trim_start().len());
    }

    fn word(&mut self) -> &'a str {
        self.skip_space();
        let end =
            self.text.find(|c: char| c.is_whitespace() || "(){};,".contains(c)).unwrap_or(self.text.len());
        self.take(end.max(1).min(self.text.len()))
    }

    fn until_line_end(&mut self) -> &'a str {
        self.take(self.text.find('\n').unwrap_or(self.text.len()))
    }

    /// What stands before a mark, which is taken too.
    fn until(&mut self, mark: char) -> Result<&'a str, String> {
        let line = self.line;
        let at = self.text.find(mark).ok_or_else(|| format!("line {line}: '{mark}' is missing"))?;
        let taken = self.take(at);
        self.take(mark.len_utf8());
        Ok(taken)
    }
}

/// A kernel that is being read.
struct Reader {
    kernel: Kernel,
    regs: HashMap<String, (RegId, RegClass)>,
    /// Predicates by their names: guards need them by type.
    preds: HashMap<String, Reg<Pred>>,
    labels: HashMap<String, LabelId>,
    shared: HashMap<String, u32>,
}

fn read_kernel(rest: &mut Cursor<'_>, target: Target) -> Result<Kernel, String> {
    let name = rest.word().to_string();
    rest.until('(')?;
    let line = rest.line;
    let list = rest.until(')')?;
    let parameters = list.split(',').map(str::trim).filter(|parameter| !parameter.is_empty());
    let fields: Result<Vec<_>, String> = parameters
        .map(|parameter| field(parameter).ok_or(format!("line {line}: '{parameter}' is not read here")))
        .collect();
    let fields = fields?;
    let directives = rest.until('{')?;
    let known = [".reqntid", ".maxntid", ".minnctapersm", ".maxnreg"];
    if let Some(word) =
        directives.split_whitespace().find(|word| word.starts_with('.') && !known.contains(word))
    {
        return Err(format!("line {}: '{word}' is not read here", rest.line));
    }
    let statements = statements(rest)?;
    let mut builder_of = KernelBuilder::new(&name, target);
    let mut layout_of_shared = SharedLayout::new();
    let (mut regs, mut preds, mut shared) = (HashMap::new(), HashMap::new(), HashMap::new());
    let mut classes: Vec<(String, RegClass)> = Vec::new();
    let mut count = 0;
    for (line, statement) in &statements {
        let fail = |what: &str| format!("line {line}: '{statement}' {what}");
        if let Some(declaration) = statement.strip_prefix(".reg") {
            classes.extend(
                registers(declaration).ok_or_else(|| fail("declares no registers that are read here"))?,
            );
        } else if statement.starts_with(".shared") {
            let (name, bytes, align) = allocation(statement).ok_or_else(|| fail("is not read here"))?;
            let _: Shared = layout_of_shared.alloc(&name, bytes, align);
            shared.insert(name, count);
            count += 1;
        }
    }
    for (name, class) in classes {
        let id = match class {
            RegClass::Pred => {
                let reg = builder_of.reg::<Pred>();
                preds.insert(name.clone(), reg);
                reg.id()
            }
            RegClass::B16 => builder_of.reg::<B16>().id(),
            RegClass::B32 => builder_of.reg::<B32>().id(),
            RegClass::B64 => builder_of.reg::<B64>().id(),
            RegClass::F32 => builder_of.reg::<F32>().id(),
        };
        if regs.insert(name.clone(), (id, class)).is_some() {
            return Err(format!("two registers are named {name}"));
        }
    }
    let mut kernel = builder_of.shared(layout_of_shared).finish().map_err(|error| error.to_string())?;
    kernel.params = layout(&fields);
    kernel.body.clear();
    let mut reader = Reader { kernel, regs, preds, labels: HashMap::new(), shared };
    for (line, statement) in &statements {
        if !statement.starts_with('.') {
            let read = reader.statement(*line, statement);
            read.map_err(|what| format!("line {line}: '{statement}' {what}"))?;
        }
    }
    let mut kernel = reader.kernel;
    flow::set_reconvergence(&mut kernel);
    Ok(kernel)
}

/// The statements of a body, with their lines; labels are statements of their own, and keep their colon.
fn statements(rest: &mut Cursor<'_>) -> Result<Vec<(usize, String)>, String> {
    let (mut all, mut depth) = (Vec::new(), 0_usize);
    let (mut statement, mut began) = (String::new(), rest.line);
    loop {
        let Some(c) = rest.text.chars().next() else {
            return Err(format!("line {}: the kernel does not end", rest.line));
        };
        let line = rest.line;
        rest.take(c.len_utf8());
        match c {
            '}' if depth == 0 && statement.trim().is_empty() => return Ok(all),
            '}' if depth == 0 => return Err(format!("line {began}: '{}' does not end", statement.trim())),
            ';' | ':'
                if depth == 0 && !(c == ':' && (statement.ends_with(':') || rest.text.starts_with(':'))) =>
            {
                if c == ':' {
                    statement.push(':');
                }
                let words: Vec<&str> = statement.split_whitespace().collect();
                all.push((began, words.join(" ")));
                statement.clear();
                continue;
            }
            '{' | '[' => depth += 1,
            '}' | ']' => depth -= 1,
            _ => {}
        }
        if statement.trim().is_empty() {
            began = line;
        }
        statement.push(c);
    }
}

/// A parameter's name and type.
fn field(parameter: &str) -> Option<(&str, ParamType)> {
    let words: Vec<&str> = parameter.split_whitespace().collect();
    let [".param", ty, .., name] = words[..] else { return None };
    Some((
        name,
        match ty {
            ".u64" | ".b64" => ParamType::U64,
            ".s64" => ParamType::S64,
            ".u32" | ".b32" => ParamType::U32,
            ".s32" => ParamType::S32,
            ".f32" => ParamType::F32,
            _ => return None,
        },
    ))
}

/// The registers of a declaration: `.b32 %r<3>` or `.f32 %a, %b`.
fn registers(declaration: &str) -> Option<Vec<(String, RegClass)>> {
    let (ty, names) = declaration.trim().split_once(' ')?;
    let class = match ty {
        ".pred" => RegClass::Pred,
        ".b16" | ".u16" | ".s16" | ".f16" => RegClass::B16,
        ".b32" | ".u32" | ".s32" | ".f16x2" => RegClass::B32,
        ".b64" | ".u64" | ".s64" => RegClass::B64,
        ".f32" => RegClass::F32,
        _ => return None,
    };
    let mut all = Vec::new();
    for name in names.split(',').map(str::trim) {
        match name.strip_suffix('>').and_then(|name| name.split_once('<')) {
            Some((prefix, count)) => {
                let count: u32 = count.parse().ok().filter(|count| *count <= MOST_REGISTERS)?;
                all.extend((0..count).map(|n| (format!("{prefix}{n}"), class)));
            }
            None => all.push((name.to_string(), class)),
        }
    }
    Some(all)
}

/// Registers of one declaration: more are a mistake.
const MOST_REGISTERS: u32 = 1 << 16;

/// `.shared .align 16 .b8 name[1024]`: its name, bytes and alignment.
fn allocation(statement: &str) -> Option<(String, u32, u32)> {
    let words: Vec<&str> = statement.split_whitespace().collect();
    let (align, ty, place) = match words[..] {
        [".shared", ".align", align, ty, place] => (align.parse().ok()?, ty, place),
        [".shared", ty, place] => (16, ty, place),
        _ => return None,
    };
    let size: u32 = match ty {
        ".b8" | ".u8" => 1,
        ".b16" => 2,
        ".b32" | ".f32" | ".u32" => 4,
        ".b64" | ".u64" => 8,
        _ => return None,
    };
    let (name, count) = place.strip_suffix(']')?.split_once('[')?;
    Some((name.into(), size.checked_mul(count.parse().ok()?)?, align))
}

/// The parts between commas that stand in no bracket.
fn operands(text: &str) -> Vec<&str> {
    let (mut parts, mut depth, mut from) = (Vec::new(), 0_usize, 0);
    for (at, c) in text.char_indices() {
        match c {
            '{' | '[' => depth += 1,
            '}' | ']' => depth = depth.saturating_sub(1),
            ',' if depth == 0 => {
                parts.push(text[from..at].trim());
                from = at + 1;
            }
            _ => {}
        }
    }
    parts.push(text[from..].trim());
    parts.retain(|part| !part.is_empty());
    parts
}

/// What stands between braces.
fn vector(text: &str) -> Option<Vec<&str>> {
    Some(operands(text.strip_prefix('{')?.strip_suffix('}')?))
}

/// A number as bits: decimal, hexadecimal, or a float by its bits or its digits.
fn number(text: &str, class: RegClass) -> Option<u64> {
    if let Some(bits) = text.strip_prefix("0f").or(text.strip_prefix("0F")) {
        return u64::from_str_radix(bits, 16).ok();
    }
    if class == RegClass::F32 {
        return text.parse::<f32>().ok().map(|x| u64::from(x.to_bits()));
    }
    let (negative, digits) = text.strip_prefix('-').map_or((false, text), |digits| (true, digits));
    let digits = digits.strip_suffix('U').unwrap_or(digits);
    let value = match digits.strip_prefix("0x").or(digits.strip_prefix("0X")) {
        Some(digits) => u64::from_str_radix(digits, 16).ok()?,
        None => digits.parse().ok()?,
    };
    let value = if negative { value.wrapping_neg() } else { value };
    Some(match class {
        RegClass::Pred => value & 1,
        RegClass::B16 => value & 0xffff,
        RegClass::B32 | RegClass::F32 => value & 0xffff_ffff,
        RegClass::B64 => value,
    })
}

fn find<T: Copy>(all: &[T], text: impl Fn(T) -> &'static str, wanted: &str) -> Option<T> {
    all.iter().copied().find(|&one| text(one) == wanted)
}

/// An instruction with what it writes and reads.
type Parts = (Op, Vec<Arg>, Vec<Arg>);

impl Reader {
    fn statement(&mut self, line: usize, statement: &str) -> Result<(), String> {
        if let Some(name) = statement.strip_suffix(':') {
            let label = self.label(name);
            self.push(line, None, (Op::Label(label), Vec::new(), Vec::new()));
            return Ok(());
        }
        let (guard, statement) = match statement.strip_prefix('@') {
            None => (None, statement),
            Some(guarded) => {
                let (guard, statement) = guarded.split_once(' ').ok_or("guards nothing")?;
                let (negated, name) = guard.strip_prefix('!').map_or((false, guard), |name| (true, name));
                let reg = *self.preds.get(name).ok_or("is guarded by what is no predicate")?;
                (Some(Guard { reg, negated }), statement)
            }
        };
        let (mnemonic, rest) = statement.split_once(' ').unwrap_or((statement, ""));
        let parts = self.instruction(mnemonic, &operands(rest))?;
        self.push(line, guard, parts);
        Ok(())
    }

    fn push(&mut self, line: usize, guard: Option<Guard>, (op, dst, src): Parts) {
        let comment = Some(Arc::from(format!("line {line}")));
        self.kernel.body.push(Inst { op, guard, dst, src, comment, section: None, loc: Location::caller() });
    }

    fn label(&mut self, name: &str) -> LabelId {
        let labels = &mut self.kernel.labels;
        *self.labels.entry(name.into()).or_insert_with(|| {
            labels.push(name.trim_start_matches('$').into());
            LabelId(labels.len() as u32 - 1)
        })
    }

    fn instruction(&mut self, mnemonic: &str, parts: &[&str]) -> Result<Parts, String> {
        let words: Vec<&str> = mnemonic.split('.').collect();
        match (words[0], parts) {
            ("bra", [target]) => {
                Ok((Op::Bra { target: self.label(target), reconverge: None }, Vec::new(), Vec::new()))
            }
            ("ret", []) => Ok((Op::Ret, Vec::new(), Vec::new())),
            ("exit", []) => Ok((Op::Exit, Vec::new(), Vec::new())),
            ("trap", []) => Ok((Op::Trap, Vec::new(), Vec::new())),
            ("ld", [values, address]) => self.load_or_store(&words, values, address, true),
            ("st", [address, values]) => self.load_or_store(&words, values, address, false),
            ("setp", [dst, a, b]) => self.setp(&words, dst, a, b),
            ("cvta", [dst, src]) => {
                let to_space = words.contains(&"to");
                if words[words.len() - 2..] != ["global", "u64"] {
                    return Err("is not read here: cvta of global addresses is".into());
                }
                let op = Op::Cvta { space: Space::Global, to_space };
                Ok((op, vec![self.reg(dst)?], vec![self.reg(src)?]))
            }
            ("bar" | "barrier", sources) if words.get(1) == Some(&"sync") => {
                let sources: Result<Vec<Arg>, String> =
                    sources.iter().map(|source| self.source(source, RegClass::B32)).collect();
                Ok((Op::BarSync { aligned: words[0] == "bar" }, Vec::new(), sources?))
            }
            ("shfl", [dst, sources @ ..]) if words.len() == 4 && words[1] == "sync" && words[3] == "b32" => {
                let mode = find(ShflMode::ALL, ShflMode::text, &format!(".{}", words[2]));
                let (dst, within) = dst.split_once('|').map_or((*dst, None), |(dst, p)| (dst, Some(p)));
                let within = within.map_or(Ok(Arg::Sink), |p| self.reg(p))?;
                let sources: Result<Vec<Arg>, String> =
                    sources.iter().map(|source| self.source(source, RegClass::B32)).collect();
                let op = Op::Shfl(mode.ok_or("has a mode that shfl does not have")?);
                Ok((op, vec![self.reg(dst)?, within], sources?))
            }
            ("mov", [dst, src]) => self.mov(mnemonic, dst, src),
            (_, [dst, sources @ ..]) => self.plain(mnemonic, dst, sources),
            _ => Err("is not read here".into()),
        }
    }

    /// An instruction of the table, found by its mnemonic and the classes of its operands.
    fn plain(&self, mnemonic: &str, dst: &str, sources: &[&str]) -> Result<Parts, String> {
        // Without a rounding, these round to nearest.
        let rounded = ["add", "sub", "mul"].into_iter().find_map(|name| {
            let rest = mnemonic.strip_prefix(name)?;
            (rest == ".f32" || rest == ".ftz.f32").then(|| format!("{name}.rn{rest}"))
        });
        let mnemonic = rounded.as_deref().unwrap_or(mnemonic);
        let (id, class) = *self.regs.get(dst).ok_or("writes to what is no register")?;
        let mut why = format!("is not read here: no instruction '{mnemonic}' is known");
        for alu in Alu::ALL {
            let line = alu.line();
            if line.text != mnemonic {
                continue;
            }
            let read = || -> Result<Vec<Arg>, String> {
                if line.dst != class || line.src.len() != sources.len() {
                    return Err(format!("has other operands than '{mnemonic}'"));
                }
                line.src.iter().zip(sources).map(|(spec, source)| self.source(source, spec.class)).collect()
            };
            match read() {
                Ok(src) => return Ok((Op::Alu(*alu), vec![Arg::Reg(id)], src)),
                Err(reason) => why = reason,
            }
        }
        Err(why)
    }

    fn mov(&self, mnemonic: &str, dst: &str, src: &str) -> Result<Parts, String> {
        let regs =
            |names: &[&str]| names.iter().map(|name| self.reg(name)).collect::<Result<Vec<Arg>, String>>();
        let wide = mnemonic.ends_with("64");
        if let Some(parts) = vector(src) {
            let op = if wide { Op::PackB64 } else { Op::PackB32 };
            return Ok((op, vec![self.reg(dst)?], regs(&parts)?));
        }
        if let Some(parts) = vector(dst) {
            let op = if wide { Op::UnpackB64 } else { Op::UnpackB32 };
            return Ok((op, regs(&parts)?, vec![self.reg(src)?]));
        }
        if let Some(special) = find(Special::ALL, Special::text, src) {
            return Ok((Op::MovSpecial(special), vec![self.reg(dst)?], Vec::new()));
        }
        if let Some(&alloc) = self.shared.get(src) {
            let address = Arg::Mem { base: MemBase::Shared(alloc), offset: 0 };
            return Ok((Op::AddrOf, vec![self.reg(dst)?], vec![address]));
        }
        let bits = mnemonic.replace(".u", ".b").replace(".s", ".b");
        self.plain(&bits, dst, &[src])
    }

    fn setp(&self, words: &[&str], dst: &str, a: &str, b: &str) -> Result<Parts, String> {
        let [_, cmp, ty] = words else { return Err("is not read here: setp with one comparison is".into()) };
        let cmp =
            find(Cmp::ALL, Cmp::text, &format!(".{cmp}")).ok_or("has a comparison that PTX does not have")?;
        let ty = ty.replace('b', "u");
        let ty = find(NumType::ALL, NumType::text, &format!(".{ty}"))
            .ok_or("compares a type that is not read here")?;
        let class = match ty {
            NumType::S16 | NumType::U16 => RegClass::B16,
            NumType::S32 | NumType::U32 => RegClass::B32,
            NumType::S64 | NumType::U64 => RegClass::B64,
            NumType::F32 => RegClass::F32,
        };
        Ok((Op::Setp { cmp, ty }, vec![self.reg(dst)?], vec![self.source(a, class)?, self.source(b, class)?]))
    }

    fn load_or_store(
        &self,
        words: &[&str],
        values: &str,
        address: &str,
        load: bool,
    ) -> Result<Parts, String> {
        let [_, space, modifiers @ .., ty] = words else { return Err("names no space and type".into()) };
        let space = match *space {
            "param" => Space::Param,
            "global" => Space::Global,
            "shared" => Space::Shared,
            _ => return Err("is not read here: the spaces param, global and shared are".into()),
        };
        let (mut width, mut cache) = (Width::V1, CacheHint::default());
        for modifier in modifiers {
            match *modifier {
                "v2" => width = Width::V2,
                "v4" => width = Width::V4,
                "nc" if load => cache.non_coherent = true,
                other => return Err(format!("has a modifier that is not read here: .{other}")),
            }
        }
        let ty = match *ty {
            "u8" | "b8" => MemTy::U8,
            "s8" => MemTy::S8,
            "b16" | "u16" | "s16" | "f16" => MemTy::B16,
            "b32" | "u32" | "s32" => MemTy::B32,
            "b64" | "u64" | "s64" => MemTy::B64,
            "f32" => MemTy::F32,
            _ => return Err("moves a type that is not read here".into()),
        };
        let class = match ty {
            MemTy::U8 | MemTy::S8 | MemTy::B32 => RegClass::B32,
            MemTy::B16 => RegClass::B16,
            MemTy::B64 => RegClass::B64,
            MemTy::F32 => RegClass::F32,
        };
        let values = vector(values).unwrap_or_else(|| vec![values]);
        if values.len() != width.count() as usize {
            return Err("has another number of values than it says".into());
        }
        let address = self.address(address, space)?;
        let order = Order::Weak;
        if load {
            let dst: Result<Vec<Arg>, String> = values.iter().map(|value| self.reg(value)).collect();
            return Ok((Op::Ld { space, ty, width, order, cache }, dst?, vec![address]));
        }
        let src: Result<Vec<Arg>, String> = values.iter().map(|value| self.source(value, class)).collect();
        let src = std::iter::once(address).chain(src?).collect();
        Ok((Op::St { space, ty, width, order, cache }, Vec::new(), src))
    }

    fn address(&self, text: &str, space: Space) -> Result<Arg, String> {
        let inside = text
            .strip_prefix('[')
            .and_then(|text| text.strip_suffix(']'))
            .ok_or("has no address in brackets")?;
        let (base, offset) = match inside.split_once('+') {
            Some((base, offset)) => {
                (base.trim(), offset.trim().parse().map_err(|_| "has an offset that is no number")?)
            }
            None => (inside.trim(), 0),
        };
        let parameter = self.kernel.params.iter().position(|param| param.name == base);
        let base = match (space, parameter, self.shared.get(base), self.regs.get(base)) {
            (Space::Param, Some(index), _, _) => MemBase::Param(index as u32),
            (Space::Shared, _, Some(&alloc), _) => MemBase::Shared(alloc),
            (Space::Global | Space::Shared, _, _, Some(&(id, _))) => MemBase::Reg(id),
            _ => return Err(format!("has an address that is none: {base}")),
        };
        Ok(Arg::Mem { base, offset })
    }

    fn reg(&self, name: &str) -> Result<Arg, String> {
        self.regs.get(name).map(|&(id, _)| Arg::Reg(id)).ok_or_else(|| format!("names no register: {name}"))
    }

    /// A register of a class, or a constant.
    fn source(&self, text: &str, class: RegClass) -> Result<Arg, String> {
        match self.regs.get(text) {
            Some(&(id, of)) if of == class => Ok(Arg::Reg(id)),
            Some(_) => Err(format!("reads {text}, which is of another class")),
            None => {
                let bits = number(text, class)
                    .ok_or_else(|| format!("reads what is neither register nor number: {text}"))?;
                Ok(Arg::Imm(Imm { class, bits }))
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A kernel that adds one to a number of its thread.
    const TEXT: &str = "
        .version 7.0
        .target sm_80   // a comment
        .address_size 64
        .visible .entry add(.param .u64 out, .param .u32 /* twice */ by)
        {
            .reg .pred %p<2>;
            .reg .b32 %r<4>;
            .reg .b64 %rd<3>;
            ld.param.u64 %rd1, [out];
            ld.param.u32 %r1, [by];
            mov.u32 %r2, %tid.x;
            setp.ge.u32 %p1, %r2, 8;
            @%p1 bra $done;
            mad.lo.u32 %r3, %r2, %r1, 1;
            mul.wide.u32 %rd2, %r2, 4;
            add.u64 %rd1, %rd1, %rd2;
            st.global.u32 [%rd1], %r3;
        $done:
            ret;
        }";

    #[test]
    fn a_plain_kernel_is_read_and_runs_in_the_simulator() {
        let module = read(TEXT).unwrap();
        let mut sim = flashcore_sim::Sim::new(flashcore_sim::Config::default());
        let out = sim.alloc("out", 32);
        let mut params = out.address.to_le_bytes().to_vec();
        params.extend(3_u32.to_le_bytes());
        let dims = flashcore_sim::LaunchDims {
            grid: [1; 3],
            block: [32, 1, 1],
            cluster: None,
            dynamic_shared: Some(0),
        };
        let report = sim.launch(&module, "add", dims, &params).unwrap();
        assert!(report.findings.is_empty(), "{:?}", report.findings);
        let numbers: Vec<u32> =
            crate::files::elements::<f32>(&sim.read(out)).iter().map(|x| x.to_bits()).collect();
        assert_eq!(numbers, (0..8).map(|i| 3 * i + 1).collect::<Vec<u32>>());
    }

    #[test]
    fn what_is_printed_here_reads_back_as_it_was() {
        let module = read(TEXT).unwrap();
        let again = read(&module.to_string()).unwrap();
        let plain = |module: &Module| -> Vec<(Op, Vec<Arg>, Vec<Arg>)> {
            module.kernels[0].body.iter().map(|inst| (inst.op, inst.dst.clone(), inst.src.clone())).collect()
        };
        assert_eq!(plain(&again), plain(&module));
    }

    #[test]
    fn what_is_not_read_is_refused_with_its_line() {
        let wrong = |from: &str, to: &str| read(&TEXT.replace(from, to)).unwrap_err();
        assert!(wrong("mul.wide.u32", "mul.strange.u32").contains("line 16"));
        assert!(wrong("%r2, 8", "%rd2, 8").contains("another class"));
        assert!(wrong("[out]", "[nowhere]").contains("nowhere"));
        assert!(wrong("sm_80", "sm_2").contains("sm_2"));
        assert!(wrong("ret;\n        }", "ret;").contains("does not end"));
        assert!(wrong("bra $done", "bra $nowhere").contains("label"));
        assert!(read("").unwrap_err().contains("no kernel"));
    }
}

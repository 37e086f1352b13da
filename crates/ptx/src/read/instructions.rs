//! Instructions: from a mnemonic and operands to an [`Op`] with its registers and constants.

use super::operands::Operand;
use super::tokens::{float, integer};
use super::{Reader, Symbol};
use crate::inst::*;
use crate::modifiers::*;
use crate::table::Alu;
use crate::types::{Imm, RegClass, RegId};

/// The mnemonic that the table has for a `mov`, whose type says only how wide it is.
fn plain_mov(ty: &str) -> Option<&'static str> {
    Some(match ty {
        "pred" => "mov.pred",
        "b16" | "u16" | "s16" => "mov.b16",
        "b32" | "u32" | "s32" => "mov.b32",
        "b64" | "u64" | "s64" => "mov.b64",
        "f32" => "mov.f32",
        _ => return None,
    })
}

fn find<T: Copy>(all: &[T], text: impl Fn(T) -> &'static str, wanted: &str) -> Option<T> {
    all.iter().copied().find(|&one| text(one).strip_prefix('.').unwrap_or(text(one)) == wanted)
}

/// The bits of a number as an operand of a class.
fn constant(negative: bool, text: &str, class: RegClass) -> Result<u64, String> {
    if class == RegClass::F32 {
        let number = float(negative, text).ok_or_else(|| {
            format!(
                "reads {text}, which is no float here: 1.0 is one, and 0f with the eight digits of its bits"
            )
        })?;
        return Ok(u64::from(number.to_bits()));
    }
    let number = integer(text).ok_or_else(|| format!("reads {text}, which is no integer of 64 bits"))?;
    let bits = match class {
        RegClass::Pred => 1,
        RegClass::B16 => 16,
        RegClass::B32 | RegClass::F32 => 32,
        RegClass::B64 => 64,
    };
    let all = u64::MAX >> (64 - bits);
    let most = if negative { all / 2 + 1 } else { all };
    if number > most {
        let sign = if negative { "-" } else { "" };
        return Err(format!("reads {sign}{text}, which has more than {bits} bits"));
    }
    Ok(if negative { number.wrapping_neg() & all } else { number })
}

/// An instruction with what it writes and reads.
pub type Parts = (Op, Vec<Arg>, Vec<Arg>);

impl<'a> Reader<'a> {
    pub fn instruction(&mut self, words: &[&str], operands: &[Operand<'a>]) -> Result<Parts, String> {
        use Operand::{Address, Name, Pair, Vector};
        let none = || (Vec::new(), Vec::new());
        let alone = |op: Op| Ok((op, none().0, none().1));
        match (words, operands) {
            (["bra"] | ["bra", "uni"], [Name(target)]) => {
                alone(Op::Bra { target: self.label(target), reconverge: None })
            }
            (["ret"] | ["ret", "uni"], []) => alone(Op::Ret),
            (["exit"], []) => alone(Op::Exit),
            (["trap"], []) => alone(Op::Trap),
            (["ld", words @ ..], [values, Address(base, offset)]) => {
                self.load_or_store(words, values, base, *offset, true)
            }
            (["st", words @ ..], [Address(base, offset), values]) => {
                self.load_or_store(words, values, base, *offset, false)
            }
            (["ld" | "st", ..], _) => {
                Err("has other operands than registers and an address in brackets".into())
            }
            (["setp", cmp, ty], [Name(dst), a, b]) => self.setp(cmp, ty, dst, a, b),
            (["cvta", "to", "global", "u64"] | ["cvta", "global", "u64"], [Name(dst), Name(src)]) => {
                let op = Op::Cvta { space: Space::Global, to_space: words[1] == "to" };
                Ok((op, vec![self.reg(dst)?], vec![self.reg(src)?]))
            }
            (["cvta", ..], _) => Err("is not read here: cvta.global.u64 and cvta.to.global.u64 are".into()),
            (["bar" | "barrier", "sync"] | ["barrier", "sync", "aligned"], sources) => {
                let aligned = words[0] == "bar" || words.len() == 3;
                Ok((Op::BarSync { aligned }, Vec::new(), self.sources(sources, RegClass::B32)?))
            }
            (["shfl", "sync", mode, "b32"], [dst, sources @ ..]) => {
                let (dst, within) = match dst {
                    Name(dst) => (self.reg(dst)?, Arg::Sink),
                    Pair(dst, within) => (self.reg(dst)?, self.reg(within)?),
                    _ => return Err("writes to what is no register".into()),
                };
                let mode =
                    find(ShflMode::ALL, ShflMode::text, mode).ok_or("has a mode that shfl does not have")?;
                Ok((Op::Shfl(mode), vec![dst, within], self.sources(sources, RegClass::B32)?))
            }
            (["mov", ty @ ("b32" | "b64")], [Name(dst), Vector(parts)]) => {
                let (op, half) =
                    if *ty == "b64" { (Op::PackB64, RegClass::B32) } else { (Op::PackB32, RegClass::B16) };
                Ok((op, vec![self.reg(dst)?], self.sources(parts, half)?))
            }
            (["mov", ty @ ("b32" | "b64")], [Vector(parts), Name(src)]) => {
                let op = if *ty == "b64" { Op::UnpackB64 } else { Op::UnpackB32 };
                let parts: Result<Vec<Arg>, String> = parts.iter().map(|part| self.result(part)).collect();
                Ok((op, parts?, vec![self.reg(src)?]))
            }
            (["mov", ty], [Name(dst), src]) => self.mov(ty, dst, src),
            ([..], [Name(dst), sources @ ..]) => self.plain(&words.join("."), dst, sources),
            _ => Err("is not read here".into()),
        }
    }

    /// An instruction of the table, found by its mnemonic and the classes of its operands.
    fn plain(&self, mnemonic: &str, dst: &str, sources: &[Operand<'a>]) -> Result<Parts, String> {
        // Without a rounding, these round to nearest.
        let rounded = ["add", "sub", "mul"].into_iter().find_map(|name| {
            let rest = mnemonic.strip_prefix(name)?;
            (rest == ".f32" || rest == ".ftz.f32").then(|| format!("{name}.rn{rest}"))
        });
        let mnemonic = rounded.as_deref().unwrap_or(mnemonic);
        let mut why = format!("is not read here: no instruction '{mnemonic}' is known");
        for alu in Alu::ALL {
            let line = alu.line();
            if line.text != mnemonic {
                continue;
            }
            let (id, class) = self.register_named(dst)?;
            let read = || -> Result<Vec<Arg>, String> {
                if line.dst != class {
                    return Err(format!("writes to {dst}, which is of another class"));
                }
                if line.src.len() != sources.len() {
                    return Err(format!("has {} sources, not {}", sources.len(), line.src.len()));
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

    fn mov(&self, ty: &str, dst: &str, src: &Operand<'a>) -> Result<Parts, String> {
        let name = match src {
            Operand::Name(name) => Some(*name),
            Operand::Special(name) => Some(name.as_str()),
            _ => None,
        };
        if let Some(special) = name.and_then(|name| find(Special::ALL, Special::text, name)) {
            let fits = if special.is_64_bit() { ["u64", "s64", "b64"] } else { ["u32", "s32", "b32"] };
            if !fits.contains(&ty) {
                return Err(format!("moves a special register as another type than .{}", fits[0]));
            }
            return Ok((Op::MovSpecial(special), vec![self.reg(dst)?], Vec::new()));
        }
        if let Some(Symbol::Shared(index)) = name.and_then(|name| self.symbols.get(name)) {
            if !["u32", "s32", "b32"].contains(&ty) {
                return Err("moves an address of shared memory as another type than .u32".into());
            }
            let address = Arg::Mem { base: MemBase::Shared(*index), offset: 0 };
            return Ok((Op::AddrOf, vec![self.reg(dst)?], vec![address]));
        }
        let float = |name: &str| matches!(self.symbols.get(name), Some(Symbol::Register(_, RegClass::F32)));
        if ty.starts_with(['u', 's']) && (float(dst) || name.is_some_and(float)) {
            return Err(format!("moves a float register as .{ty}"));
        }
        let mnemonic = plain_mov(ty).ok_or("moves a type that is not read here")?;
        self.plain(mnemonic, dst, std::slice::from_ref(src))
    }

    fn setp(
        &self,
        cmp: &str,
        ty: &str,
        dst: &str,
        a: &Operand<'a>,
        b: &Operand<'a>,
    ) -> Result<Parts, String> {
        let cmp = find(Cmp::ALL, Cmp::text, cmp).ok_or("has a comparison that is not read here")?;
        let bits = ty.starts_with('b');
        if bits && !matches!(cmp, Cmp::Eq | Cmp::Ne) {
            return Err(format!(
                "compares bits, which are equal or not: {} needs a .u or .s type",
                cmp.text()
            ));
        }
        let number = if bits { ty.replacen('b', "u", 1) } else { ty.to_owned() };
        let ty = find(NumType::ALL, NumType::text, &number).ok_or("compares a type that is not read here")?;
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
        values: &Operand<'a>,
        base: &str,
        offset: i32,
        load: bool,
    ) -> Result<Parts, String> {
        let (&space, words) = words.split_first().ok_or("names no space")?;
        let space = match space {
            "param" => Space::Param,
            "global" => Space::Global,
            "shared" => Space::Shared,
            _ => return Err("is not read here: the spaces param, global and shared are".into()),
        };
        let (non_coherent, words) = match words {
            ["nc", rest @ ..] if load => (true, rest),
            rest => (false, rest),
        };
        let (width, words) = match words {
            ["v2", rest @ ..] => (Width::V2, rest),
            ["v4", rest @ ..] => (Width::V4, rest),
            rest => (Width::V1, rest),
        };
        let [ty] = words else {
            return Err(format!(
                "has modifiers that are not read here, or in another order: .{}",
                words.join(".")
            ));
        };
        let ty = match *ty {
            "u8" | "b8" => MemTy::U8,
            "s8" if load => MemTy::S8,
            "s8" => MemTy::U8,
            "b16" | "u16" | "s16" => MemTy::B16,
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
        let values = match values {
            Operand::Vector(values) if width != Width::V1 => values.as_slice(),
            Operand::Vector(_) => return Err("moves a list of values without .v2 or .v4".into()),
            one => std::slice::from_ref(one),
        };
        if values.len() != width.count() as usize {
            return Err("has another number of values than it says".into());
        }
        let base = match (space, self.symbols.get(base)) {
            (Space::Param, Some(&Symbol::Param(index))) => MemBase::Param(index),
            (Space::Shared, Some(&Symbol::Shared(index))) => MemBase::Shared(index),
            (Space::Global | Space::Shared, Some(&Symbol::Register(id, _))) => MemBase::Reg(id),
            _ => return Err(format!("has an address that is none of this space: {base}")),
        };
        let address = Arg::Mem { base, offset };
        let (order, cache) = (Order::Weak, CacheHint { non_coherent, ..CacheHint::default() });
        if load {
            let dst: Result<Vec<Arg>, String> = values.iter().map(|value| self.target(value)).collect();
            return Ok((Op::Ld { space, ty, width, order, cache }, dst?, vec![address]));
        }
        let values = self.sources(values, class)?;
        let src = std::iter::once(address).chain(values).collect();
        Ok((Op::St { space, ty, width, order, cache }, Vec::new(), src))
    }

    fn register_named(&self, name: &str) -> Result<(RegId, RegClass), String> {
        match self.symbols.get(name) {
            Some(&Symbol::Register(id, class)) => Ok((id, class)),
            _ => Err(format!("has {name} where a register must be")),
        }
    }

    fn reg(&self, name: &str) -> Result<Arg, String> {
        self.register_named(name).map(|(id, _)| Arg::Reg(id))
    }

    /// A register that is written.
    fn target(&self, operand: &Operand<'a>) -> Result<Arg, String> {
        match operand {
            Operand::Name(name) => self.reg(name),
            _ => Err("writes to what is no register".into()),
        }
    }

    /// A register that is written, or `_`.
    fn result(&self, operand: &Operand<'a>) -> Result<Arg, String> {
        if *operand == Operand::Sink { Ok(Arg::Sink) } else { self.target(operand) }
    }

    /// A register of a class, or a constant.
    fn source(&self, operand: &Operand<'a>, class: RegClass) -> Result<Arg, String> {
        match operand {
            Operand::Name(name) => match self.register_named(name)? {
                (id, of) if of == class => Ok(Arg::Reg(id)),
                _ => Err(format!("reads {name}, which is of another class")),
            },
            Operand::Number(negative, text) => {
                Ok(Arg::Imm(Imm { class, bits: constant(*negative, text, class)? }))
            }
            Operand::Special(name) => Err(format!("reads {name}, which only mov does")),
            _ => Err("reads what is neither register nor number".into()),
        }
    }

    fn sources(&self, operands: &[Operand<'a>], class: RegClass) -> Result<Vec<Arg>, String> {
        operands.iter().map(|operand| self.source(operand, class)).collect()
    }
}

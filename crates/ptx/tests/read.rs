//! The reader of PTX text: what it reads is what was written, and what is not PTX is refused with its line. ptxas is
//! asked too: what it refuses in these ways, the reader refuses.

use flashcore_ptx::ptxas::{Ptxas, PtxasError};
use flashcore_ptx::read::{ReadError, module};
use flashcore_ptx::*;

/// A kernel with one of everything that is read.
const TEXT: &str = "\
.version 7.0
.target sm_80   // a comment
.address_size 64
.visible .entry add(.param .u64 out, .param .u32 /* twice */ by)
{
    .reg .pred %p<2>;
    .reg .b16 %h<3>;
    .reg .b32 %r<4>;
    .reg .b64 %rd<3>;
    .reg .f32 %f<3>;
    .shared .align 16 .b8 tile[64];
    ld.param.u64 %rd1, [out];
    ld.param.u32 %r1, [by];
    mov.u32 %r2, %tid.x;
    mov.f32 %f1, 0f3F800000;
    mov.b32 {%h1, %h2}, %r2;
    setp.ge.u32 %p1, %r2, 8;
    @%p1 bra $done;
    mad.lo.u32 %r3, %r2, %r1, 1;
    mul.wide.u32 %rd2, %r2, 4;
    add.u64 %rd1, %rd1, %rd2;
    st.global.u32 [%rd1], %r3;
$done:
    ret;
}
";

/// Stands in the place of one instruction.
const STORE: &str = "st.global.u32 [%rd1], %r3";

/// What is changed, and into what. The reader refuses every one, and so does ptxas.
const WRONG: &[(&str, &str)] = &[
    // Numbers.
    ("0f3F800000", "0f3F8"),
    ("0f3F800000", "0f3F8000000"),
    ("0f3F800000", "0d3FF0"),
    ("0f3F800000", "1"),
    ("0f3F800000", "1.5e"),
    ("0f3F800000", "1.0e400"),
    ("0f3F800000", "-0f3F800000"),
    ("0f3F800000", "nan"),
    ("0f3F800000", "1.0f"),
    ("%r2, 8", "%r2, 08"),
    ("%r2, 8", "%r2, 0b2"),
    ("%r2, 8", "%r2, 0x8g"),
    ("%r2, 8", "%r2, 0x"),
    ("%r2, 8", "%r2, 8u"),
    ("%r2, 8", "%r2, 8abc"),
    ("%r2, 8", "%r2, 1.5"),
    ("%r2, 8", "%r2, 0f3F800000"),
    // Names.
    ("%r<4>", "%😀, %r<4>"),
    ("%r<4>", "%, %r<4>"),
    ("%r<4>", "_, %r<4>"),
    ("%r<4>", "$, %r<4>"),
    ("%r<4>", "1r, %r<4>"),
    ("%r<4>", "a.b, %r<4>"),
    ("%r<4>", "%tid, %r<4>"),
    ("%r<4>", "WARP_SZ, %r<4>"),
    ("%r<4>", "%r<4>, %r3"),
    ("%r<4>", "out, %r<4>"),
    ("%r<4>", "tile, %r<4>"),
    ("%r<4>", "$done, %r<4>"),
    ("%r<4>", "%r<0>"),
    ("%r<4>", "%r<4"),
    ("%r<4>", "%r<-4>"),
    ("%r<4>", "%r<4294967299>"),
    ("$done:\n", "$done:\n$done:\n"),
    ("bra $done", "bra nowhere"),
    ("by)", "out)"),
    (".entry add", ".entry 1add"),
    (".entry add", ".entry $"),
    // Punctuation and what does not end.
    ("%r2, 8", "%r2, 8,"),
    ("%r2, 8", "%r2,, 8"),
    ("%r2, 8", "%r2 8"),
    ("%r2, 8;", "%r2, 8"),
    (STORE, "st.global.u32 [%rd1], %r3 garbage"),
    (STORE, "st.global.u32 [%rd1, %r3"),
    (STORE, ";"),
    ("    ret;\n}", "    ret;"),
    ("    ret;\n}", "    ret\n}"),
    ("    ret;\n}", "    ret;\n}}"),
    ("    ret;\n}", "    ret;\n} garbage"),
    ("    ret;\n}", "    ret;\n} // é"),
    ("    ret;\n}", "    ret;\n} /* open"),
    ("by)", "by,)"),
    // Directives.
    (".version 7.0", ".version 7.9"),
    (".version 7.0", ".version 6.0"),
    (".version 7.0", ".version 7"),
    (".version 7.0", ".version 99.0"),
    (".version 7.0\n", ""),
    (".target sm_80", ""),
    ("sm_80", "sm_2"),
    ("sm_80", "sm_80, foo"),
    (".address_size 64", ".address_size 32"),
    (".address_size 64", ".address_size 64\n.address_size 64"),
    (".address_size 64", ".frobnicate 3"),
    (".u32 /*", ".u17 /*"),
    ("by)", "by)\n.reqntid 0"),
    ("by)", "by)\n.reqntid 32\n.maxntid 32"),
    ("by)", "by)\n.maxnreg 0"),
    ("by)", "by)\n.foo 3"),
    (".u64 out", ".u64 .ptr .align 3 out"),
    (".visible", ".visible .weak"),
    (".align 16 .b8 tile[64]", ".align 3 .b8 tile[64]"),
    (".align 16 .b8 tile[64]", ".align 0 .b8 tile[64]"),
    (".align 16 .b8 tile[64]", ".b8 tile[0]"),
    (".align 16 .b8 tile[64]", ".b8 tile[-4]"),
    (".align 16 .b8 tile[64]", ".b8 tile[99999999]"),
    (".align 16 .b8 tile[64]", ".b8 tile[64]; .shared .b8 tile[4]"),
    (".reg .pred %p<2>;", ".reg .pred %p<2>; add.u32 %q1, 1, 2; .reg .b32 %q<3>;"),
    // Modifiers and operands.
    ("@%p1 bra", "@%p1 bra.foo"),
    ("@%p1 bra", "@%r1 bra"),
    ("ret;", "ret.foo;"),
    ("ret;", "bar.sync 16; ret;"),
    ("ret;", "bar.sync.foo 0; ret;"),
    ("ret;", "bar.sync; ret;"),
    ("ret;", "bar.sync 0, 31; ret;"),
    (STORE, "cvta %rd1, %rd2"),
    (STORE, "cvta%rd1,%rd2"),
    (STORE, "setp.lt.b32 %p1, %r1, %r2"),
    (STORE, "mov.u32 %f1, %r1"),
    (STORE, "mov.f32 %f1, %tid.x"),
    (STORE, "mov.b32 %r1, {%h1, %h2, %h1}"),
    (STORE, "mov.b32 %r1, {%h1}"),
    (STORE, "mov.u32 %r1, {%h1, %h2}"),
    (STORE, "shfl.sync.bfly.b32 %r1|%r2, %r2, 1, 31, -1"),
    (STORE, "ld.global.f16 %h1, [%rd1]"),
    (STORE, "ld.shared.nc.u32 %r1, [tile]"),
    (STORE, "ld.global.v2.u32 {%r1}, [%rd1]"),
    (STORE, "ld.global.v3.u32 {%r1, %r2, %r3}, [%rd1]"),
    (STORE, "st.global.nc.u32 [%rd1], %r3"),
    (STORE, "st.global.v2.v2.u32 [%rd1], {%r3, %r2}"),
    (STORE, "st.global.v4.u64 [%rd1], {%rd1, %rd1, %rd1, %rd1}"),
    (STORE, "st.global.u32 [%rd1-4], %r3"),
];

/// What both accept.
const RIGHT: &[(&str, &str)] = &[
    ("0f3F800000", "0F3f800000"),
    ("0f3F800000", "0d3FF0000000000000"),
    ("0f3F800000", "-1.5"),
    ("0f3F800000", "1e3"),
    ("0f3F800000", "1.0e-3"),
    ("%r2, 8", "%r2, 010"),
    ("%r2, 8", "%r2, 0b101"),
    ("%r2, 8", "%r2, 0xFFU"),
    ("%r2, 8", "%r2, -1"),
    ("%r<4>", "%done$_, _a, %r<0x4>"),
    ("by)", "by)\n.reqntid 32, 1"),
    ("by)", "by)\n.maxntid 64\n.minnctapersm 2\n.maxnreg 64"),
    (".u64 out", ".u64 .ptr .global .align 16 out"),
    (".visible ", ""),
    (".address_size 64", ""),
    ("    ret;\n}", "}"),
    ("ret;", "barrier.sync.aligned 0; bar.sync 1, 32; ret.uni;"),
    (STORE, "st .global.u32 [%rd1+-4],\n%r3"),
    (STORE, "st.global.v2.u32 [%rd1], {%r3, %r2}"),
    (STORE, "ld.global.nc.v2.u32 {%r3, %r2}, [%rd1]"),
    (STORE, "st.shared.u32 [tile+60], %r3"),
    (STORE, "cvta.to.global.u64 %rd1, %rd2"),
    (STORE, "setp.eq.b32 %p1, %r1, %r2"),
    (STORE, "mov.b32 {%h1, _}, %r1"),
    (STORE, "shfl.sync.bfly.b32 %r1|%p1, %r2, 1, 31, -1"),
];

fn changed((from, to): (&str, &str)) -> String {
    assert!(TEXT.contains(from), "{from}");
    TEXT.replacen(from, to, 1)
}

/// Requires the verdicts of the reader and, where it is at hand, of ptxas on each text.
fn judge(changes: &[(&str, &str)], right: bool) {
    let ptxas = Ptxas::find_or_skip().unwrap();
    let judge_one = |&change: &(&str, &str)| {
        let text = changed(change);
        let read = module(&text);
        assert_eq!(read.is_ok(), right, "{change:?}: {:?}", read.err().map(|error| error.to_string()));
        if let Err(error) = read {
            assert!(error.to_string().contains("line "), "{change:?}: {error}");
        }
        match ptxas.as_ref().map(|ptxas| ptxas.assemble_text(&text, Target::Sm80)) {
            None => {}
            Some(Ok(_)) => assert!(right, "{change:?}: ptxas takes it"),
            Some(Err(PtxasError::Refused { .. })) => assert!(!right, "{change:?}: ptxas refuses it"),
            Some(Err(error)) => panic!("{error}"),
        }
    };
    std::thread::scope(|scope| {
        for half in changes.chunks(changes.len().div_ceil(2)) {
            scope.spawn(move || half.iter().for_each(judge_one));
        }
    });
}

#[test]
fn what_is_no_ptx_is_refused_with_its_line_as_ptxas_refuses_it() {
    judge(WRONG, false);
}

#[test]
fn what_is_written_in_another_way_is_read_as_ptxas_reads_it() {
    judge(RIGHT, true);
}

#[test]
fn what_is_printed_here_reads_back_as_it_was() {
    // Shared memory is printed as a part of what the launch gives, which has no size in the text.
    let text = TEXT.replace(".shared .align 16 .b8 tile[64];", "");
    let first = module(&text).unwrap();
    let again = module(&first.to_string()).unwrap();
    let plain = |module: &Module| -> Vec<(Op, Vec<Arg>, Vec<Arg>)> {
        module.kernels[0].body.iter().map(|inst| (inst.op, inst.dst.clone(), inst.src.clone())).collect()
    };
    assert_eq!(plain(&again), plain(&first));
}

#[test]
fn conversions_of_fp8_are_read_where_version_and_target_have_them() {
    let text = |version: &str, target: Target| {
        format!(
            ".version {version}\n.target {target}\n.address_size 64\n.visible .entry test()\n{{
                .reg .b16 %h<5>; .reg .b32 %r<4>; .reg .f32 %f<3>;
                mov.f32 %f1, 0f3F900000; mov.f32 %f2, 0fC3E00000;
                cvt.rn.satfinite.e4m3x2.f32 %h1, %f1, %f2; cvt.rn.satfinite.e5m2x2.f32 %h2, %f1, %f2;
                cvt.rn.f16x2.e4m3x2 %r1, %h1; cvt.rn.f16x2.e5m2x2 %r2, %h2;
                cvt.rn.satfinite.e4m3x2.f16x2 %h3, %r2; cvt.rn.satfinite.e5m2x2.f16x2 %h4, %r1;
                prmt.b32 %r3, %r1, %r2, 0x6420; ret; }}"
        )
    };
    let ptxas = Ptxas::find_or_skip().unwrap();
    // Hopper had them before Ada.
    for (version, target, right) in [
        ("8.1", Target::Sm89, true),
        ("8.1", Target::Sm80, false),
        ("8.0", Target::Sm89, false),
        ("7.8", Target::Sm90, true),
    ] {
        let text = text(version, target);
        assert_eq!(module(&text).is_ok(), right, "{version} {target}");
        if let Some(ptxas) = &ptxas {
            assert_eq!(ptxas.assemble_text(&text, target).is_ok(), right, "{version} {target}");
        }
    }
    let read = module(&text("8.1", Target::Sm89)).unwrap();
    let ops = |module: &Module| module.kernels[0].body.iter().map(|inst| inst.op).collect::<Vec<_>>();
    assert_eq!(ops(&read), ops(&module(&read.to_string()).unwrap()));
}

#[test]
fn bounds_of_a_kernel_are_kept() {
    let kernel = |words: &str| module(&changed(("by)", &format!("by)\n{words}")))).unwrap().kernels.remove(0);
    assert_eq!(kernel(".reqntid 32, 2").threads, Some(Threads::Exactly([32, 2, 1])));
    let bounded = kernel(".maxntid 64 .minnctapersm 2 .maxnreg 40");
    assert_eq!(bounded.threads, Some(Threads::AtMost([64, 1, 1])));
    assert_eq!((bounded.min_blocks_per_sm, bounded.max_regs), (Some(2), Some(40)));
}

#[test]
fn what_is_not_read_is_refused_in_words_with_its_line() {
    let wrong = |from: &str, to: &str| module(&changed((from, to))).unwrap_err().to_string();
    for (from, to, words) in [
        ("mul.wide.u32", "mul.strange.u32", "line 20: 'mul.strange.u32 %rd2, %r2, 4' is not read here"),
        ("%r2, 8", "%rd2, 8", "line 17: 'setp.ge.u32 %p1, %rd2, 8' reads %rd2, which is of another class"),
        ("%r2, 8", "%r2, 4294967296", "has more than 32 bits"),
        ("%r2, 8", "%r2, 18446744073709551616", "no integer of 64 bits"),
        ("[out]", "[nowhere]", "line 12"),
        ("[out]", "[out+4294967296]", "no number of 32 bits"),
        ("sm_80", "sm_2", "line 2: no target sm_2 is known here; possible are sm_80"),
        (".version 7.0", ".version 7.9", "line 1: '7.9' is no version of PTX that is known here: 7.0 to"),
        ("ret;\n}", "ret;", "line 25: the kernel `add` does not end"),
        ("bra $done", "bra $nowhere", "(line 18): label"),
        ("%r<4>", "%r<65537>", "line 8: '.reg .b32 %r<65537>' makes more than 65536 registers"),
        (
            "mov.u32 %r2, %tid.x",
            "mov.u32 %r2, %r2",
            "(line 14): register %r2 may be read before it is written",
        ),
        (STORE, "{ ret; }", "line 22: a block in braces is not read here"),
        (STORE, ".local .b8 stack[1099511627776]", "line 22: '.local .b8 stack[1099511627776]' is not read"),
        (
            STORE,
            "add.rn.bf16 %h1, %h1, %h2",
            "line 22: 'add.rn.bf16 %h1, %h1, %h2' needs .version 7.8 or later",
        ),
    ] {
        let said = wrong(from, to);
        assert!(said.contains(words), "{words} is missing in: {said}");
    }
    assert!(module("").unwrap_err().to_string().contains("the text ends"));
    assert!(module(&TEXT[..TEXT.find(".visible").unwrap()]).unwrap_err().to_string().contains("no kernel"));
}

/// Texts made to take much time or memory: each is read or refused at once, on a thread's stack.
#[test]
fn texts_that_are_far_too_large_or_deep_are_refused_before_they_take_memory() {
    let with = |statement: &str| changed((STORE, statement));
    let many = |count: usize, one: &dyn Fn(usize) -> String| (0..count).map(one).collect::<String>();
    let refused = |text: &str| match module(text) {
        Err(ReadError::At { what, .. }) => what,
        other => panic!("{other:?}"),
    };
    refused(&with(&"{".repeat(1 << 20)));
    refused(&with(&format!("mov.b32 %r1, {}", "{".repeat(1 << 20))));
    refused(&with(&format!("mov.b32 %r1, {}", "[".repeat(1 << 20))));
    refused(&with(&format!("mov.b32 %r1, {}", "-".repeat(1 << 20))));
    refused(&"/*".repeat(1 << 20));
    refused(&".".repeat(1 << 20));
    assert!(refused(&" ".repeat((16 << 20) + 1)).contains("bytes"));
    assert!(refused(&with(&"ret;".repeat(200_000))).contains("instructions"));
    assert!(refused(&with(&many(3, &|n| format!(".reg .b32 %x{n}_<30000>;")))).contains("registers"));
    let branches = many(20_000, &|n| format!("$l{n}: @%p1 bra $l{};\n", n / 2));
    assert!(refused(&with(&format!(".reg .b32 %x<60000>; {branches} ret"))).contains("too large"));
    // As many branches with few registers are only long, whichever way they lead.
    assert!(module(&with(&format!("{branches} ret"))).is_ok());
    let back = many(20_000, &|n| format!("$l{n}: bra $l{};\n", n.wrapping_sub(1).min(19_999)));
    assert!(module(&with(&format!("{back} ret"))).is_ok());
    let ladder = many(20_000, &|n| format!("$l{n}: mov.u32 %r3, %r2; @%p1 bra $l{};\n", n.saturating_sub(1)));
    assert!(module(&with(&format!("{ladder} ret"))).is_ok());
    assert!(module(&with(&format!("{} ret", "@%p1 ret;\n".repeat(60_000)))).is_ok());
    // What is written under one predicate after the other is remembered pair by pair.
    let set = many(1000, &|n| format!("setp.eq.u32 %q{n}, %r2, {n};\n"));
    let pairs = many(1000, &|n| format!("@%q{n} bra $l{n};\nmov.u32 %x{n}, %r2;\n$l{n}:\n"));
    let declared = ".reg .b32 %x<1000>; .reg .pred %q<1000>;";
    assert!(module(&with(&format!("{declared} {set} {pairs} ret"))).is_ok());
    let name = "a".repeat(1 << 20);
    let said = refused(&with(&format!("{name}.b32 %r1, %r2")));
    assert!(said.len() < 1000, "a message repeats {} characters", said.len());
}

//! What everything was measured on and by which binary, file by file.

use super::page::{Block, Line, Piece, Section, Table, code, number, text};
use super::source::{Evidence, Field, Number, Style};

/// The smallest and the largest of a state over the cells of a benchmark.
fn range(root: &Field<'_>, key: &str) -> Option<(Number, Number)> {
    let states = root.get("cells").items().into_iter().flat_map(|cell| cell.get("states").items());
    let values: Vec<Number> = states.filter_map(|state| state.get(key).number()).collect();
    Some((values.iter().cloned().reduce(Number::min)?, values.into_iter().reduce(Number::max)?))
}

/// Everything that throttled clocks; absent where no state says.
fn throttles(root: &Field<'_>) -> Option<Vec<String>> {
    let states = root.get("cells").items().into_iter().flat_map(|cell| cell.get("states").items());
    let told: Vec<Field<'_>> =
        states.map(|state| state.get("throttled_by")).filter(|reasons| !reasons.is_absent()).collect();
    let mut all = Vec::new();
    for reason in told.iter().flat_map(Field::items) {
        let reason = reason.text().unwrap_or_default().to_string();
        if !all.contains(&reason) {
            all.push(reason);
        }
    }
    (!told.is_empty()).then_some(all)
}

struct Facts {
    table: Table,
}

impl Facts {
    fn words(&mut self, what: &str, value: Option<&str>) {
        if let Some(value) = value {
            self.line(what, text(value));
        }
    }

    fn number(&mut self, what: &str, value: Option<Number>, style: Style, unit: &str) {
        if let Some(value) = value {
            let mut line: Line = vec![Piece::Number(value, style)];
            if !unit.is_empty() {
                line.push(Piece::Text(format!(" {unit}")));
            }
            self.line(what, line);
        }
    }

    fn range(&mut self, what: &str, values: Option<(Number, Number)>, unit: &str) {
        let Some((low, high)) = values else { return };
        if low.value() == high.value() {
            return self.number(what, Some(low), Style::Exact, unit);
        }
        let between = Piece::Text(" to ".into());
        let line = vec![
            Piece::Number(low, Style::Exact),
            between,
            Piece::Number(high, Style::Exact),
            Piece::Text(format!(" {unit}")),
        ];
        self.line(what, line);
    }

    fn line(&mut self, what: &str, line: Line) {
        self.table.rows.push(vec![text(what), line]);
    }
}

fn facts(root: &Field<'_>, evidence: &Evidence) -> Table {
    let mut facts = Facts { table: Table::new(evidence.short_name(), &["fact", "value"]) };
    let (environment, gpu) = (root.get("environment"), root.get("gpu"));
    let (ours, torch, cpu) = (gpu.get("ours"), gpu.get("torch"), environment.get("cpu"));
    facts.words("schema", root.get("schema").text());
    facts.words("taken", root.get("created").text());
    let command: Vec<&str> = root.get("command").items().iter().filter_map(Field::text).collect();
    if let Some((program, arguments)) = command.split_first() {
        let program = program.rsplit('/').next().unwrap_or(program);
        facts.line("command", code([&[program], arguments].concat().join(" ")));
    }
    if root.get("complete").flag() == Some(false) {
        facts.line("complete", text("no: it was interrupted"));
    }
    if let Some(commit) = environment.get("commit").text() {
        let dirty = match environment.get("dirty").flag() {
            Some(true) => ", with changes that no commit holds",
            Some(false) => ", unchanged",
            None => "",
        };
        facts.line("commit", vec![Piece::Code(commit.into()), Piece::Text(dirty.into())]);
    }
    facts.words("device", ours.get("device").text().or_else(|| root.get("device").text()));
    facts.words("compute capability", ours.get("capability").text());
    facts.number("multiprocessors", ours.get("sms").number(), Style::Exact, "");
    facts.number("memory", ours.get("memory_bytes").number(), Style::Gibibytes, "");
    facts.words("driver", gpu.get("driver").text());
    facts.words("CUDA of the driver", ours.get("cuda").text());
    facts.number("highest SM clock", ours.get("sm_clock_khz").number(), Style::Thousandths, "MHz");
    facts.range("SM clock", range(root, "sm_clock_mhz"), "MHz");
    facts.range("memory clock", range(root, "memory_clock_mhz"), "MHz");
    facts.range("power", range(root, "power_w"), "W");
    facts.range("power limit", range(root, "power_limit_w"), "W");
    facts.range("temperature", range(root, "temperature_c"), "°C");
    if let Some(reasons) = throttles(root) {
        let words = if reasons.is_empty() { "nothing".to_string() } else { reasons.join(", ") };
        facts.line("clocks held back by", text(words));
    }
    facts.words("torch", torch.get("version").text());
    facts.words("CUDA of torch", torch.get("cuda").text());
    facts.number("cuDNN", torch.get("cudnn").number(), Style::Exact, "");
    facts.words("no torch because", root.get("no_torch_because").text());
    facts.words("FlashAttention-3", torch.get("versions").get("fa3").text());
    facts.words("no FlashAttention-3 because", gpu.get("no_fa3_because").text());
    facts.words("samples", root.get("regime").text());
    facts.words("CPU", cpu.get("model").text());
    facts.number("cores", cpu.get("cores").number(), Style::Exact, "");
    facts.words("instructions", cpu.get("chosen").text());
    facts.number("memory of the host", environment.get("memory_bytes").number(), Style::Gibibytes, "");
    facts.number("took", root.get("seconds").number(), Style::Digits, "s");
    facts.number("workers lost", root.get("lost_workers").number(), Style::Exact, "");
    facts.table
}

/// The section.
pub fn section(files: &[Evidence]) -> Section {
    let tables = (0..files.len()).map(|file| facts(&Field::root(files, file), &files[file])).collect();
    let words = "What a file does not say is left out.";
    let mut blocks = vec![Block::Text(text(words)), Block::Tables(tables)];
    blocks.extend(Some(seeds(files)).filter(|seeds| !seeds.rows.is_empty()).map(Block::Table));
    Section { id: "environment", title: "Environment".into(), blocks }
}

/// The seeds of every file's inputs, with their checksums.
fn seeds(files: &[Evidence]) -> Table {
    let mut table = Table::new("Inputs", &["file", "dtype", "#seed", "#elements", "checksums of q, k and v"]);
    for (file, evidence) in files.iter().enumerate() {
        for input in Field::root(files, file).get("inputs").items() {
            let checksums =
                input.get("checksums").items().iter().filter_map(Field::number).collect::<Vec<_>>();
            let mut sums: Line = Vec::new();
            for sum in checksums {
                if !sums.is_empty() {
                    sums.push(Piece::Text(", ".into()));
                }
                sums.push(Piece::Number(sum, Style::Exact));
            }
            table.rows.push(vec![
                text(evidence.short_name()),
                text(input.get("dtype").text().unwrap_or_default()),
                number(input.get("seed").number(), Style::Exact),
                number(input.get("elements").number(), Style::Exact),
                sums,
            ]);
        }
    }
    table
}

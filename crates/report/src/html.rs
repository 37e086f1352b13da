//! A report as one HTML file that needs nothing else: charts inline, no script, no network. It is well-formed XML
//! too, so that a program can read it.

use std::fmt::Write;

use super::chart::{LOOK, PALETTE};
use super::page::{Block, Line, Page, Piece, Section, Table, Tile};
use super::register::Register;
use super::source::{Evidence, Number, Style};
use super::svg::escape;

const PAGE_LOOK: &str = include_str!("page.css");

/// The page as HTML.
pub fn render(page: &Page, files: &[Evidence]) -> String {
    let mut html = Html { files, out: String::new(), register: Register::default(), charts: 0 };
    let title = escape(&page.title);
    let lead = html.line(&page.lead);
    let _ = write!(
        html.out,
        "<!DOCTYPE html>\n<html lang=\"en\" xmlns=\"http://www.w3.org/1999/xhtml\">\n<head>\n<meta charset=\"utf-8\"/>\n\
         <meta name=\"viewport\" content=\"width=device-width, initial-scale=1\"/>\n\
         <meta name=\"color-scheme\" content=\"light dark\"/>\n<title>{title}</title>\n\
         <style>\n{PALETTE}{LOOK}{PAGE_LOOK}</style>\n</head>\n<body>\n<header>\n<h1>{title}</h1>\n<p>{lead}</p>\n"
    );
    html.out.push_str("<nav aria-label=\"Sections\"><ul>\n");
    let evidence = [("evidence", "Evidence")];
    let links = page.sections.iter().map(|section| (section.id, section.title.as_str())).chain(evidence);
    for (id, title) in links {
        let _ = writeln!(html.out, "<li><a href=\"#{id}\">{}</a></li>", escape(title));
    }
    html.out.push_str("</ul></nav>\n</header>\n<main>\n");
    for section in &page.sections {
        html.section(section);
    }
    html.evidence();
    html.out.push_str("</main>\n</body>\n</html>\n");
    html.out
}

struct Html<'a> {
    files: &'a [Evidence],
    out: String,
    register: Register,
    charts: usize,
}

impl Html<'_> {
    fn section(&mut self, section: &Section) {
        let _ = writeln!(self.out, "<section id=\"{}\">\n<h2>{}</h2>", section.id, escape(&section.title));
        for block in &section.blocks {
            self.block(block);
        }
        self.out.push_str("</section>\n");
    }

    fn block(&mut self, block: &Block) {
        match block {
            Block::Text(line) => {
                let line = self.line(line);
                let _ = writeln!(self.out, "<p>{line}</p>");
            }
            Block::Tiles(tiles) => self.tiles(tiles),
            Block::Table(table) => self.table(table),
            Block::Folded(title, table) => {
                let _ = writeln!(self.out, "<details>\n<summary>{}</summary>", escape(title));
                self.table(table);
                self.out.push_str("</details>\n");
            }
            Block::Figure(chart, table) => {
                self.charts += 1;
                let class = if chart.is_wide() { " class=\"wide\"" } else { "" };
                let _ = writeln!(self.out, "<figure{class}>\n{}", chart.inline(self.charts));
                self.table(table);
                self.out.push_str("</figure>\n");
            }
            Block::Tables(tables) => {
                self.out.push_str("<div class=\"tables\">\n");
                for table in tables {
                    self.table(table);
                }
                self.out.push_str("</div>\n");
            }
        }
    }

    fn tiles(&mut self, tiles: &[Tile]) {
        self.out.push_str("<ul class=\"tiles\">\n");
        for tile in tiles {
            let number = self.number(&tile.number, tile.style, "big");
            let label = self.line(&tile.label);
            let _ = writeln!(self.out, "<li>{number}<span>{label}</span></li>");
        }
        self.out.push_str("</ul>\n");
    }

    fn table(&mut self, table: &Table) {
        // A wide table scrolls inside its frame rather than the page.
        let caption = escape(&table.caption);
        let _ = writeln!(
            self.out,
            "<div class=\"frame\" role=\"region\" aria-label=\"{caption}\" tabindex=\"0\"><table>\n<caption>{caption}</caption>\n<thead><tr>"
        );
        for (name, numeric) in &table.head {
            let class = if *numeric { " class=\"num\"" } else { "" };
            let _ = writeln!(self.out, "<th scope=\"col\"{class}>{}</th>", escape(name));
        }
        self.out.push_str("</tr></thead>\n<tbody>\n");
        for row in &table.rows {
            self.out.push_str("<tr>");
            for (i, (cell, (_, numeric))) in row.iter().zip(&table.head).enumerate() {
                let has_number =
                    cell.iter().any(|piece| matches!(piece, Piece::Number(..) | Piece::Best(..)));
                let cell = self.line(cell);
                let class = match (*numeric, has_number) {
                    (true, _) => " class=\"num\"",
                    (false, true) => " class=\"whole\"",
                    (false, false) => "",
                };
                let _ = if i == 0 {
                    write!(self.out, "<th scope=\"row\">{cell}</th>")
                } else {
                    write!(self.out, "<td{class}>{cell}</td>")
                };
            }
            self.out.push_str("</tr>\n");
        }
        self.out.push_str("</tbody></table></div>\n");
    }

    fn line(&mut self, line: &Line) -> String {
        line.iter().map(|piece| self.piece(piece)).collect()
    }

    fn piece(&mut self, piece: &Piece) -> String {
        match piece {
            Piece::Text(words) => marked_verdict(words),
            Piece::Code(words) => format!("<code>{}</code>", escape(words)),
            Piece::Number(number, style) => self.number(number, *style, ""),
            Piece::Best(number, style) => self.number(number, *style, "best"),
            Piece::Absent(why) if why.is_empty() => "<span class=\"absent\">absent</span>".into(),
            Piece::Absent(why) => format!("<span class=\"absent\" title=\"{}\">absent</span>", escape(why)),
            Piece::File(file) => {
                format!("<a href=\"#file{}\">{}</a>", file + 1, escape(self.files[*file].short_name()))
            }
        }
    }

    fn number(&mut self, number: &Number, style: Style, extra: &str) -> String {
        let name = self.register.name(number);
        let space = if extra.is_empty() { "" } else { " " };
        format!(
            "<a class=\"n{space}{extra}\" data-style=\"{}\" href=\"#{name}\">{}</a>",
            style.name(),
            escape(&style.write(number))
        )
    }

    /// The files, and the field of each number that stands above.
    fn evidence(&mut self) {
        self.out.push_str(
            "<section id=\"evidence\">\n<h2>Evidence</h2>\n<p>Every number above is a link to its line here: the field of \
             the file that it was read from, as a JSON pointer, and its value as it stands there. With a division sign \
             between two fields it is their quotient.</p>\n",
        );
        for (i, file) in self.files.iter().enumerate() {
            let (name, link) = (escape(&file.name), escape(&file.link));
            let _ = writeln!(
                self.out,
                "<details id=\"file{}\">\n<summary>{name}</summary>\n<p><a href=\"{link}\">{name}</a>, BLAKE3 <code \
                 class=\"hash\">{}</code></p>\n<div class=\"frame\"><table class=\"fields\">\n<caption>Fields of {name}</caption>\n\
                 <thead><tr><th scope=\"col\">field</th><th scope=\"col\" class=\"num\">value</th></tr></thead>\n<tbody>",
                i + 1,
                file.hash
            );
            for (name, number) in self.register.all().filter(|(_, number)| number.file() == i) {
                let _ = writeln!(
                    self.out,
                    "<tr id=\"{name}\"><td><code>{}</code></td><td class=\"num\">{}</td></tr>",
                    escape(&number.path()),
                    number.value()
                );
            }
            self.out.push_str("</tbody></table></div>\n</details>\n");
        }
        self.out.push_str("</section>\n");
    }
}

/// Words with verdicts made to stand out.
fn marked_verdict(words: &str) -> String {
    let mut out = escape(words);
    for (verdict, class) in [("FASTER", "good"), ("SLOWER", "bad"), ("UNDECIDED", "open"), ("SAME", "open")] {
        if out.ends_with(verdict) {
            out.truncate(out.len() - verdict.len());
            let _ = write!(out, "<span class=\"verdict {class}\">{verdict}</span>");
            break;
        }
    }
    out
}

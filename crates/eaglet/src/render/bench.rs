//! The curve of `eaglet bench`: a line while it is measured, table and bars at its end, JSON, and a picture. Pure.

use super::units;
use eaglet_core::stats::Percentiles;
use eaglet_generate::bench::{KNEE_TOLERANCE, Level};
use serde_json::{Value, json};
use std::fmt::Write;

/// One level, just measured.
pub(crate) fn line(level: &Level) -> String {
    let failed: u64 = level.failures.values().sum();
    let trouble = match &level.last_failure {
        Some(detail) => format!(", {failed} failed ({detail})"),
        None => String::new(),
    };
    format!(
        "{} in flight: {} tok/s, {} answers in {}{trouble}",
        level.concurrency,
        rate(level.tokens_per_s),
        units::count(level.answers),
        units::time(level.seconds)
    )
}

fn rate(tokens_per_s: f64) -> String {
    if tokens_per_s < 100.0 { format!("{tokens_per_s:.1}") } else { units::count(tokens_per_s.round() as u64) }
}

/// `p50 / p95` in seconds.
fn pair(milliseconds: Option<&Percentiles>, digits: usize) -> String {
    milliseconds.map_or("-".to_owned(), |p| {
        let [median, most] = [p.p50, p.p95].map(|ms| f64::from(ms) / 1000.0);
        format!("{median:.digits$} / {most:.digits$}")
    })
}

fn best(levels: &[Level]) -> f64 {
    levels.iter().map(|level| level.tokens_per_s).fold(f64::MIN_POSITIVE, f64::max)
}

const COLUMNS: [&str; 9] = [
    "in flight",
    "tok/s",
    "of best",
    "answers",
    "first token s p50/p95",
    "per token s p50/p95",
    "queued",
    "cache",
    "failed",
];

/// The cells of a level, as the columns have them.
fn cells(level: &Level, best: f64) -> [String; 9] {
    let failed: u64 = level.failures.values().sum();
    [
        level.concurrency.to_string(),
        rate(level.tokens_per_s),
        format!("{:.0} %", level.tokens_per_s * 100.0 / best),
        units::count(level.answers),
        pair(level.first_token_ms.as_ref(), 2),
        pair(level.inter_token_ms.as_ref(), 3),
        level.waiting_max.map_or("-".to_owned(), |waiting| format!("{waiting:.0}")),
        level.kv_use_max.map_or("-".to_owned(), |used| format!("{:.0} %", used * 100.0)),
        failed.to_string(),
    ]
}

/// All levels in columns, and what the knee is.
pub(crate) fn table(levels: &[Level], knee: usize) -> String {
    let rows: Vec<[String; 9]> = levels.iter().map(|level| cells(level, best(levels))).collect();
    let width = |column: usize| {
        let cells = rows.iter().map(|row| row[column].len());
        cells.chain([COLUMNS[column].len()]).max().unwrap_or(0)
    };
    let widths: Vec<usize> = (0..COLUMNS.len()).map(width).collect();
    let mut text = String::new();
    let mut row = |cells: &[&str]| {
        let padded: Vec<String> = cells.iter().zip(&widths).map(|(cell, width)| format!("{cell:>width$}")).collect();
        let _ = writeln!(text, "{}", padded.join("  "));
    };
    row(&COLUMNS);
    for cells in &rows {
        row(&cells.each_ref().map(String::as_str));
    }
    let _ = writeln!(text, "\n{}", verdict(levels, knee));
    text
}

fn verdict(levels: &[Level], knee: usize) -> String {
    let Level { concurrency, tokens_per_s, .. } = &levels[knee];
    let last = knee + 1 == levels.len();
    let beyond = if last { "; it may rise beyond: measure higher levels" } else { "" };
    format!(
        "knee: {concurrency} in flight, {} tok/s, the smallest within {:.0} % of the best ({} tok/s){beyond}",
        rate(*tokens_per_s),
        KNEE_TOLERANCE * 100.0,
        rate(best(levels))
    )
}

/// The curve for a terminal: a bar for each level.
pub(crate) fn bars(levels: &[Level], knee: usize) -> String {
    const WIDTH: f64 = 50.0;
    let mut text = String::new();
    for (index, level) in levels.iter().enumerate() {
        let bar = "#".repeat((level.tokens_per_s / best(levels) * WIDTH).round() as usize);
        let mark = if index == knee { "  <- knee" } else { "" };
        let _ = writeln!(text, "{:>9} | {bar} {}{mark}", level.concurrency, rate(level.tokens_per_s));
    }
    text
}

/// What `--json` prints.
pub(crate) fn json(levels: &[Level], knee: usize) -> Value {
    json!({"v": 1, "knee": levels[knee].concurrency, "knee_tolerance": KNEE_TOLERANCE, "levels": levels})
}

const WIDTH: f64 = 720.0;
const HEIGHT: f64 = 380.0;
/// Around the plot: room for numbers and names.
const LEFT: f64 = 80.0;
const TOP: f64 = 40.0;
const RIGHT: f64 = 30.0;
const BOTTOM: f64 = 60.0;

/// The curve as a picture; levels stand at equal distances.
pub(crate) fn svg(levels: &[Level], knee: usize) -> String {
    let top = round_up(best(levels));
    let apart = (WIDTH - LEFT - RIGHT) / (levels.len().max(2) - 1) as f64;
    let x = |index: usize| LEFT + apart * index as f64;
    let y = |rate: f64| HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * rate / top;
    let mut text = format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {WIDTH} {HEIGHT}\" width=\"{WIDTH}\" font-family=\"sans-serif\" font-size=\"13\">\n\
         <rect width=\"{WIDTH}\" height=\"{HEIGHT}\" fill=\"white\"/>\n"
    );
    for quarter in 0..=4 {
        let value = top * f64::from(quarter) / 4.0;
        let _ = writeln!(
            text,
            "<line x1=\"{LEFT}\" x2=\"{}\" y1=\"{y:.1}\" y2=\"{y:.1}\" stroke=\"#ddd\"/>\
             <text x=\"{}\" y=\"{:.1}\" text-anchor=\"end\">{}</text>",
            WIDTH - RIGHT,
            LEFT - 8.0,
            y(value) + 4.0,
            rate(value),
            y = y(value),
        );
    }
    let points: Vec<String> = levels
        .iter()
        .enumerate()
        .map(|(index, level)| format!("{:.1},{:.1}", x(index), y(level.tokens_per_s)))
        .collect();
    let _ = writeln!(
        text,
        "<polyline points=\"{}\" fill=\"none\" stroke=\"#2563eb\" stroke-width=\"2\"/>",
        points.join(" ")
    );
    for (index, level) in levels.iter().enumerate() {
        let (x, y) = (x(index), y(level.tokens_per_s));
        let (radius, colour) = if index == knee { (7, "#dc2626") } else { (4, "#2563eb") };
        let _ = writeln!(
            text,
            "<circle cx=\"{x:.1}\" cy=\"{y:.1}\" r=\"{radius}\" fill=\"{colour}\"><title>{} tok/s at {}</title></circle>\
             <text x=\"{x:.1}\" y=\"{}\" text-anchor=\"middle\">{}</text>",
            rate(level.tokens_per_s),
            level.concurrency,
            HEIGHT - BOTTOM + 20.0,
            level.concurrency,
        );
    }
    let _ = write!(
        text,
        "<text x=\"{:.1}\" y=\"{}\" text-anchor=\"middle\">requests in flight</text>\n\
         <text x=\"{LEFT}\" y=\"22\">tokens a second; {}</text>\n</svg>\n",
        (LEFT + WIDTH - RIGHT) / 2.0,
        HEIGHT - 15.0,
        verdict(levels, knee),
    );
    text
}

/// The next of 1, 2, 2.5, 5, 10 times a power of ten.
fn round_up(value: f64) -> f64 {
    let power = 10f64.powf(value.log10().floor());
    [1.0, 2.0, 2.5, 5.0, 10.0].into_iter().map(|step| step * power).find(|round| *round >= value).unwrap_or(value)
}

/// A page with the picture and the table, which opens from the disk and asks for nothing else.
pub(crate) fn html(levels: &[Level], knee: usize) -> String {
    let mut rows = String::new();
    let _ = writeln!(rows, "<tr>{}</tr>", COLUMNS.map(|name| format!("<th>{name}</th>")).concat());
    for (index, level) in levels.iter().enumerate() {
        let class = if index == knee { " class=\"knee\"" } else { "" };
        let cells = cells(level, best(levels)).map(|cell| format!("<td>{cell}</td>")).concat();
        let _ = writeln!(rows, "<tr{class}>{cells}</tr>");
    }
    format!(
        "<!doctype html>\n<meta charset=\"utf-8\">\n<title>eaglet bench</title>\n\
         <style>body {{ font-family: sans-serif; margin: 2em }} td, th {{ padding: 0.2em 0.8em; text-align: right }} \
         .knee {{ background: #fee2e2 }}</style>\n{}<table>\n{rows}</table>\n",
        svg(levels, knee)
    )
}

#[cfg(test)]
mod tests {
    use super::*;
    use eaglet_core::stats::percentiles;

    fn level(concurrency: usize, tokens_per_s: f64) -> Level {
        Level {
            concurrency,
            seconds: 60.0,
            tokens: (tokens_per_s * 60.0) as u64,
            tokens_per_s,
            answers: 12,
            mean_tokens: Some(160.0),
            first_token_ms: percentiles(&[250, 900]),
            inter_token_ms: percentiles(&[83, 84]),
            failures: Default::default(),
            last_failure: None,
            waiting_max: Some(3.0),
            kv_use_max: None,
            preemptions: None,
        }
    }

    fn levels() -> Vec<Level> {
        let mut levels = vec![level(1, 10.2), level(32, 1535.0), level(64, 1550.4)];
        levels[2].failures.insert("overloaded", 4);
        levels[2].last_failure = Some("HTTP 429: busy".to_owned());
        levels
    }

    #[test]
    fn a_sweep_reads_well() {
        insta::assert_snapshot!(table(&levels(), 1) + "\n" + &bars(&levels(), 1) + "\n" + &line(&levels()[2]), @r"
        in flight  tok/s  of best  answers  first token s p50/p95  per token s p50/p95  queued  cache  failed
                1   10.2      1 %       12            0.25 / 0.90        0.083 / 0.084       3      -       0
               32  1,535     99 %       12            0.25 / 0.90        0.083 / 0.084       3      -       0
               64  1,550    100 %       12            0.25 / 0.90        0.083 / 0.084       3      -       4

        knee: 32 in flight, 1,535 tok/s, the smallest within 3 % of the best (1,550 tok/s)

                1 |  10.2
               32 | ################################################## 1,535  <- knee
               64 | ################################################## 1,550

        64 in flight: 1,550 tok/s, 12 answers in 1 m 00 s, 4 failed (HTTP 429: busy)
        ");
    }

    #[test]
    fn pictures_are_well_formed_and_show_each_level() {
        let picture = svg(&levels(), 1);
        for tag in ["svg", "circle", "text", "title"] {
            let (open, close) =
                (picture.matches(&format!("<{tag}")).count(), picture.matches(&format!("</{tag}>")).count());
            assert_eq!(open, close, "{tag}");
        }
        assert_eq!(picture.matches("<circle").count(), 3);
        assert!(picture.contains("at 32</title>") && !picture.contains("NaN"));
        let page = html(&levels(), 1);
        assert_eq!((page.matches("<tr").count(), page.matches("class=\"knee\"").count()), (4, 1));
        assert!(!svg(&[level(1, 3.0)], 0).contains("NaN"), "one level is a picture too");
    }

    #[test]
    fn scales_end_at_round_numbers() {
        for (value, round) in [(10.2, 20.0), (1550.4, 2000.0), (100.0, 100.0), (2.2, 2.5), (0.03, 0.05)] {
            assert!((round_up(value) - round).abs() < 1e-9, "{value}");
        }
    }
}

use super::*;

fn script(text: &str) -> Result<FaultScript> {
    FaultScript::from_toml(text)
}

fn faults(text: &str) -> Faults {
    Faults::new(script(text).map_err(|e| e.to_string()).unwrap(), 7, 100)
}

#[test]
fn windows_open_close_and_come_again() {
    let mut faults = faults(
        "[[fault]]\nkind = \"refuse\"\nat = \"1m\"\nfor = 10\nevery = \"100s\"\nstatus = 429\nretry-after = \"5s\"",
    );
    let refused = |hit: Hit| hit.instead == Some(Instead::Refuse(429, Some((5.0, RetryAfterAs::Seconds))));
    let at: Vec<bool> = [59.9, 60.0, 69.9, 70.0, 159.9, 160.0, 170.0, 1060.0]
        .map(|now| refused(faults.decide(now, Target::Generation)))
        .to_vec();
    assert_eq!(at, [false, true, true, false, false, true, false, true]);
    assert_eq!(faults.decide(60.0, Target::Other), Hit::default(), "only generations are refused");
    assert_eq!(faults.next_change_s(0.0), None, "a refusal is no matter of the whole server");
}

#[test]
fn the_server_as_a_whole_is_as_bad_as_its_worst_fault_and_says_when_that_changes() {
    let faults = faults(
        "[[fault]]\nkind = \"stall\"\nat = 10\nfor = 20\n[[fault]]\nkind = \"restart\"\nat = 20\nfor = 5\n\
         [[fault]]\nkind = \"shutdown\"\nat = 50\ntimes = 1",
    );
    let mut now = 0.0;
    let mut seen = vec![(now, faults.health(now))];
    while let Some(next) = faults.next_change_s(now) {
        now = next;
        seen.push((now, faults.health(now)));
    }
    let expected = [
        (0.0, Health::Serving),
        (10.0, Health::Stalled),
        (20.0, Health::Dead),
        (25.0, Health::Stalled),
        (30.0, Health::Serving),
        (50.0, Health::ShutDown),
    ];
    assert_eq!(seen, expected);
}

#[test]
fn probability_and_count_are_kept_and_the_seed_decides() {
    let text = "[[fault]]\nkind = \"cut\"\nprobability = 0.25\n[[fault]]\nkind = \"reset\"\ntimes = 3";
    let hits = |seed| {
        let mut faults = Faults::new(script(text).map_err(|e| e.to_string()).unwrap(), seed, 50);
        (0..2000).map(|_| faults.decide(1.0, Target::Generation)).collect::<Vec<_>>()
    };
    let first = hits(1);
    let cuts: Vec<usize> = first.iter().filter_map(|hit| hit.break_off.map(|(after, _)| after)).collect();
    assert!((400..600).contains(&cuts.len()), "{} of 2000", cuts.len());
    assert!(cuts.iter().all(|after| (1..=50).contains(after)));
    assert_eq!(first.iter().filter(|hit| hit.instead == Some(Instead::Reset)).count(), 3);
    assert_eq!(first, hits(1));
    assert_ne!(first, hits(2));
}

#[test]
fn windows_of_a_rule_with_a_probability_happen_or_not_as_a_whole() {
    let faults = faults("[[fault]]\nkind = \"restart\"\nfor = 10\nevery = 100\nprobability = 0.5");
    let happened = (0..200).filter(|round| faults.health(f64::from(*round) * 100.0) == Health::Dead).count();
    assert!((60..140).contains(&happened), "{happened} of 200");
    for round in 0..200 {
        let at = |into| faults.health(f64::from(round) * 100.0 + into);
        assert_eq!(at(0.0), at(9.9), "one window, one fate");
    }
}

#[test]
fn a_line_says_the_same_as_a_table() {
    let fault = Fault::from_line("at=60s kind=restart for=30 probability=0.5").map_err(|e| e.to_string()).unwrap();
    assert_eq!((fault.kind, fault.at.seconds(), fault.probability), (Kind::Restart, 60.0, 0.5));
    assert_eq!(fault.length.map(Span::seconds), Some(30.0));
}

#[test]
fn what_means_nothing_is_refused() {
    let cases = [
        ("kind = \"explode\"", "explode"),
        ("kind = \"cut\"\nstatus = 500", "status"),
        ("kind = \"refuse\"\nstatus = 200", "400 to 599"),
        ("kind = \"slow-first-token\"", "delay"),
        ("kind = \"stall\"\nevery = 5\nfor = 9", "every"),
        ("kind = \"stall\"\nwhen = 5", "when"),
        ("kind = \"cut\"\nprobability = 1.5", "probability"),
        ("kind = \"stall\"\nat = \"soon\"", "soon"),
    ];
    for (rule, named) in cases {
        let error = script(&format!("[[fault]]\n{rule}")).unwrap_err().to_string();
        assert!(error.contains(named), "{rule}: {error}");
    }
    assert!(Fault::from_line("kind").unwrap_err().to_string().contains("key=value"));
}

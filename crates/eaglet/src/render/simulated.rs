//! What a simulated server says of itself. Pure.

use eaglet_serve::simulate::Settings;

/// The lines shown when it starts.
pub(crate) fn greeting(url: &str, settings: &Settings) -> String {
    let Settings { profile, speed, seed, faults } = settings;
    let kv_tokens = profile.kv_blocks * profile.block_tokens;
    let at_speed = if *speed == 1.0 { String::new() } else { format!(", at {speed} times its speed") };
    let faults = match faults.faults.len() {
        0 => "nothing goes wrong".to_owned(),
        1 => "1 fault by script".to_owned(),
        count => format!("{count} faults by script"),
    };
    format!(
        "simulating {name} at {url}{at_speed}\n\
         no model and no GPU: answers are made-up words, {mean} tokens long in the mean (seed {seed})\n\
         model {model}, {seqs} sequences at once, {kv_tokens} tokens of cache, {context} of context; {faults}",
        name = profile.name,
        mean = profile.answers.mean_tokens,
        model = profile.model,
        seqs = profile.max_num_seqs,
        context = profile.max_model_len,
    )
}

#[cfg(test)]
mod tests {
    use super::*;
    use eaglet_serve::simulate::Profile;

    #[test]
    fn it_says_what_it_pretends_to_be() {
        let settings = Settings { speed: 20.0, ..Settings::new(Profile::named("kimi-k2.5-8gpu").unwrap()) };
        insta::assert_snapshot!(greeting("http://127.0.0.1:8000", &settings), @r"
        simulating kimi-k2.5-8gpu at http://127.0.0.1:8000, at 20 times its speed
        no model and no GPU: answers are made-up words, 1263 tokens long in the mean (seed 0)
        model moonshotai/Kimi-K2.5, 256 sequences at once, 384000 tokens of cache, 16384 of context; nothing goes wrong
        ");
    }
}

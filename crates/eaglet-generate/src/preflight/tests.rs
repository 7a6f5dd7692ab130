use super::*;
use std::num::NonZeroUsize;

fn settings(max_completion_tokens: Option<u64>, max_seq_len: Option<u64>) -> GenerateSettings {
    GenerateSettings { max_completion_tokens, max_seq_len, ..GenerateSettings::new(NonZeroUsize::MIN) }
}

fn context(max_completion_tokens: u64, max_seq_len: u64) -> Level {
    let server = ServerInfo { model: "m".into(), root: None, max_model_len: Some(4096), owned_by: None };
    check_context(&settings(Some(max_completion_tokens), Some(max_seq_len)), &server).level
}

#[test]
fn limits_are_held_against_the_servers_context() {
    assert_eq!(context(1024, 4096), Level::Ok);
    assert_eq!(context(1024, 16_384), Level::Warning);
    assert_eq!(context(8192, 16_384), Level::Failure);
    assert_eq!(context(2048, 2048), Level::Failure);
}

#[test]
fn the_disk_estimate_counts_both_stages() {
    let need = disk_need(1000, 400_000, &settings(Some(8192), None), Some(7168));
    assert_eq!(need.responses_bytes, 1000 * RECORD_BYTES + 400_000 + 700_000 + 8_192_000 * RECORD_BYTES_PER_TOKEN);
    assert_eq!(need.hidden_states_bytes, Some((8_192_000 + 100_000) * 7168 * 8));
    assert_eq!(check_disk(&need, u64::MAX).level, Level::Ok);
    assert_eq!(check_disk(&need, need.responses_bytes).level, Level::Warning);
    assert_eq!(check_disk(&need, 0).level, Level::Warning);
}

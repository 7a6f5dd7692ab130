//! Each fault as a client sees it, over a pipe, on a stopped clock.

#![allow(clippy::unwrap_used)]

mod common;

use common::{CHAT, Client, chat, metric, profile, seconds, start, start_with_faults, streamed};
use eaglet_serve::simulate::{Settings, Simulator};
use tokio::time::Instant;

const TOKENS: usize = 20;

async fn stream(server: &Simulator) -> Option<common::Got> {
    let mut client = Client::to(server);
    client.write("POST", CHAT, &streamed(chat("Hello")).to_string()).await;
    client.read().await
}

async fn at(begin: Instant, second: f64) {
    tokio::time::sleep_until(begin + seconds(second)).await;
}

#[tokio::test(start_paused = true)]
async fn refusals_name_the_wait_in_seconds_or_as_a_date() {
    let begin = Instant::now();
    let server = start_with_faults(
        "[[fault]]\nkind = \"refuse\"\nstatus = 429\nretry-after = 7\nfor = 10\n\
         [[fault]]\nkind = \"refuse\"\nretry-after = 9\nretry-after-as = \"date\"\nat = 10\nfor = 10",
    );
    let got = stream(&server).await.unwrap();
    assert_eq!((got.status, got.header("retry-after")), (429, Some("7")));
    assert_eq!(got.json()["error"]["type"], "RateLimitError");
    assert_eq!(Client::to(&server).get("/health").await.status, 200, "only generations are refused");
    at(begin, 10.0).await;
    let got = stream(&server).await.unwrap();
    assert_eq!(got.status, 503);
    let date = got.header("retry-after").unwrap();
    assert!(date.ends_with(" GMT") && date.split(' ').count() == 6, "{date}");
    at(begin, 20.0).await;
    assert_eq!(stream(&server).await.unwrap().streamed_ids().len(), TOKENS);
}

#[tokio::test(start_paused = true)]
async fn a_reset_before_the_reply_leaves_nothing() {
    let server = start_with_faults("[[fault]]\nkind = \"reset\"\ntimes = 1");
    assert!(stream(&server).await.is_none());
    assert!(stream(&server).await.unwrap().whole);
}

#[tokio::test(start_paused = true)]
async fn cut_and_reset_streams_end_after_their_tokens_without_an_end_mark() {
    for kind in ["cut", "reset"] {
        let server = start_with_faults(&format!("[[fault]]\nkind = \"{kind}\"\nafter-tokens = 5\ntimes = 1"));
        let got = stream(&server).await.unwrap();
        assert_eq!((got.whole, got.streamed_ids().len()), (false, 5), "{kind}");
        tokio::time::sleep(seconds(0.2)).await;
        assert_eq!(server.gauges().running, 0, "its sequence is gone");
        assert_eq!(stream(&server).await.unwrap().streamed_ids().len(), TOKENS);
    }
}

#[tokio::test(start_paused = true)]
async fn a_whole_reply_is_cut_in_its_middle() {
    let server = start_with_faults("[[fault]]\nkind = \"cut\"\nafter-tokens = 5");
    let mut client = Client::to(&server);
    client.write("POST", CHAT, &chat("Hello").to_string()).await;
    let got = client.read().await.unwrap();
    assert_eq!((got.status, got.whole), (200, false));
}

#[tokio::test(start_paused = true)]
async fn a_hanging_stream_is_silent_while_others_go_on() {
    let server = start_with_faults("[[fault]]\nkind = \"hang\"\nafter-tokens = 5\ntimes = 1");
    let mut client = Client::to(&server);
    client.write("POST", CHAT, &streamed(chat("Hello")).to_string()).await;
    assert!(client.listen(seconds(1.0)).await.0 > 0);
    assert_eq!(client.listen(seconds(3600.0)).await, (0, false));
    assert!(stream(&server).await.unwrap().whole);
}

#[tokio::test(start_paused = true)]
async fn an_aborted_answer_is_a_proper_reply_that_says_so() {
    let server = start_with_faults("[[fault]]\nkind = \"abort\"\nafter-tokens = 5");
    let got = stream(&server).await.unwrap();
    assert_eq!((got.status, got.whole, got.streamed_ids().len()), (200, true, 5));
    let events = got.events();
    assert_eq!(events[events.len() - 2]["choices"][0]["finish_reason"], "abort");
    assert_eq!(events[events.len() - 1]["usage"]["completion_tokens"], 5);
    let whole = Client::to(&server).post(CHAT, &chat("Hello")).await.json();
    assert_eq!(whole["choices"][0]["finish_reason"], "abort");
    assert_eq!(server.gauges().running, 0);
}

#[tokio::test(start_paused = true)]
async fn a_first_token_can_come_late() {
    let server = start_with_faults("[[fault]]\nkind = \"slow-first-token\"\ndelay = \"30s\"");
    let mut client = Client::to(&server);
    let begin = Instant::now();
    client.write("POST", CHAT, &streamed(chat("Hello")).to_string()).await;
    client.listen(seconds(0.01)).await;
    assert_eq!(client.listen(seconds(29.9)).await, (0, false), "only the head of the reply came");
    assert_eq!(client.read().await.unwrap().streamed_ids().len(), TOKENS);
    assert!(begin.elapsed() >= seconds(30.0));
}

#[tokio::test(start_paused = true)]
async fn in_a_stall_all_streams_pause_and_then_go_on() {
    let begin = Instant::now();
    let server = start_with_faults("[[fault]]\nkind = \"stall\"\nat = 1\nfor = 60");
    let mut clients: Vec<Client> = (0..3).map(|_| Client::to(&server)).collect();
    for client in &mut clients {
        client.write("POST", CHAT, &streamed(chat("Hello")).to_string()).await;
    }
    at(begin, 1.05).await;
    for client in &mut clients {
        client.listen(seconds(0.01)).await;
    }
    assert_eq!(metric(&server, "vllm:num_requests_running").await, Some(3.0), "the gauges answer and do not move");
    for client in &mut clients {
        assert_eq!(client.listen(seconds(15.0)).await, (0, false));
    }
    for client in &mut clients {
        assert_eq!(client.read().await.unwrap().streamed_ids().len(), TOKENS);
    }
    let took = begin.elapsed().as_secs_f64();
    assert!((61.8..62.2).contains(&took), "20 steps of 0.1 s and a pause of 60 s took {took}");
}

#[tokio::test(start_paused = true)]
async fn a_dead_engine_resets_refuses_and_comes_back_with_nothing() {
    let begin = Instant::now();
    let server = start_with_faults("[[fault]]\nkind = \"restart\"\nat = 1\nfor = 30");
    let got = stream(&server).await.unwrap();
    assert!(!got.whole && (9..=10).contains(&got.streamed_ids().len()), "{got:?}");
    assert!(server.connect().is_err(), "refused");
    at(begin, 30.9).await;
    assert!(server.connect().is_err(), "still refused");
    at(begin, 31.01).await;
    assert_eq!(metric(&server, "vllm:generation_tokens_total").await, Some(0.0), "it has forgotten everything");
    assert_eq!(stream(&server).await.unwrap().streamed_ids().len(), TOKENS);
}

#[tokio::test(start_paused = true)]
async fn a_shut_down_server_hangs_silently_until_its_process_is_gone() {
    let begin = Instant::now();
    let server = start_with_faults("[[fault]]\nkind = \"shutdown\"\nat = 1\nfor = 60");
    let mut client = Client::to(&server);
    client.write("POST", CHAT, &streamed(chat("Hello")).to_string()).await;
    at(begin, 1.05).await;
    client.listen(seconds(0.01)).await;
    assert!(server.connect().is_err(), "new connections are refused");
    assert_eq!(client.listen(seconds(59.0)).await, (0, false), "open ones are silent");
    assert_eq!(client.listen(seconds(2.0)).await, (0, true), "the process is gone");
    assert!(stream(&server).await.unwrap().whole, "and back");
}

#[tokio::test(start_paused = true)]
async fn a_server_told_to_end_stays_down_whatever_the_script_says() {
    let server = start_with_faults("[[fault]]\nkind = \"restart\"\nat = 5\nfor = 5");
    let mut client = Client::to(&server);
    client.write("POST", CHAT, &streamed(chat("Hello")).to_string()).await;
    client.listen(seconds(1.0)).await;
    server.shut_down();
    assert_eq!(client.listen(seconds(20.0)).await, (0, false));
    assert!(server.connect().is_err());
    drop(client);
    server.all_gone().await;
}

#[tokio::test(start_paused = true)]
async fn metrics_can_be_missing_or_under_other_names() {
    let begin = Instant::now();
    let server = start_with_faults(
        "[[fault]]\nkind = \"metrics-missing\"\nfor = 10\n[[fault]]\nkind = \"metrics-renamed\"\nat = 10\nfor = 10",
    );
    assert_eq!(Client::to(&server).get("/metrics").await.status, 404);
    at(begin, 10.0).await;
    assert_eq!(metric(&server, "vllm:num_requests_running").await, None);
    assert_eq!(metric(&server, "engine_v2:num_requests_running").await, Some(0.0));
    at(begin, 20.0).await;
    assert_eq!(metric(&server, "vllm:num_requests_running").await, Some(0.0));
}

#[tokio::test(start_paused = true)]
async fn the_same_seed_gives_the_same_accidents_and_answers() {
    let play = async |seed| {
        let faults = "[[fault]]\nkind = \"cut\"\nprobability = 0.4";
        let faults = eaglet_serve::simulate::FaultScript::from_toml(faults).unwrap();
        let server = start(Settings { faults, seed, ..Settings::new(profile()) });
        let mut lengths = Vec::new();
        for _ in 0..20 {
            lengths.push(stream(&server).await.unwrap().streamed_ids());
        }
        lengths
    };
    let first = play(1).await;
    assert!(first.iter().any(|ids| ids.len() < TOKENS) && first.iter().any(|ids| ids.len() == TOKENS));
    assert_eq!(first, play(1).await);
    assert_ne!(first, play(2).await);
}

//! Links the unwinder into the binary, so that glibc is the only shared library it needs (`ldd`) and scp is the whole installation.
//!
//! Rust's standard library asks for `-lgcc_s`. A linker script of that name, found first, answers with the static `libgcc_eh` that every C
//! compiler carries.

fn main() {
    println!("cargo:rerun-if-changed=build.rs");
    let target = std::env::var("TARGET").unwrap_or_default();
    if !target.ends_with("linux-gnu") {
        return;
    }
    let Ok(out_dir) = std::env::var("OUT_DIR") else { return };
    let script = std::path::Path::new(&out_dir).join("libgcc_s.so");
    match std::fs::write(&script, "INPUT(-lgcc_eh -lgcc)\n") {
        Ok(()) => println!("cargo:rustc-link-search=native={out_dir}"),
        Err(error) => {
            println!("cargo:warning=the binary will need libgcc_s.so: cannot write {}: {error}", script.display())
        }
    }
}

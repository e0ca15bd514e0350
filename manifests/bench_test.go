package manifests

import (
	"strings"
	"testing"
)

// BenchmarkDecodeDeployment: what apply and static pods pay per object.
func BenchmarkDecodeDeployment(b *testing.B) {
	in := "apiVersion: apps/v1\nkind: Deployment\nmetadata: {name: a}\nspec:\n  selector: {matchLabels: {a: b}}\n  template:\n    metadata: {labels: {a: b}}\n    spec:\n      containers:\n      - name: c\n        image: app.wasm\n        ports: [{containerPort: 80}]\n        resources: {limits: {memory: 64Mi}}\n"
	b.SetBytes(int64(len(in)))
	for b.Loop() {
		if _, err := Decode(strings.NewReader(in), Options{}); err != nil {
			b.Fatal(err)
		}
	}
}

// BenchmarkPodAdmission: defaults, validation and the walk over what is not
// implemented, as every create pays them.
func BenchmarkPodAdmission(b *testing.B) {
	p := wasmPod()
	for b.Loop() {
		Default(p)
		if errs := Validate(p); len(errs) > 0 {
			b.Fatal(errs)
		}
		Unsupported(p)
	}
}

// BenchmarkCheckNumbers: one pass over a body.
func BenchmarkCheckNumbers(b *testing.B) {
	body := []byte(strings.Repeat(`{"spec":{"containers":[{"name":"web","image":"reg.example/app:1.2.3"}]}}`, 100))
	b.SetBytes(int64(len(body)))
	for b.Loop() {
		if err := CheckNumbers(body, nil); err != nil {
			b.Fatal(err)
		}
	}
}

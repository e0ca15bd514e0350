package manifests

import (
	"encoding/binary"
	"errors"
	"fmt"
	"strings"
	"testing"
	"unicode/utf16"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/runtime/serializer/cbor/direct"
)

const podHead = `apiVersion: v1
kind: Pod
metadata:
  name: p
`

func podWith(container string) string {
	return podHead + "spec:\n  containers:\n  - name: c\n    image: app.wasm\n" + container
}

func decode(t *testing.T, in string) ([]Document, error) {
	t.Helper()
	return Decode(strings.NewReader(in), Options{File: "f.yaml"})
}

func TestDecodeFormats(t *testing.T) {
	cborCM, err := direct.Marshal(map[string]any{"apiVersion": "v1", "kind": "ConfigMap", "metadata": map[string]any{"name": "a"}, "data": map[string]any{"k": "v"}})
	if err != nil {
		t.Fatal(err)
	}
	cm := "apiVersion: v1\nkind: ConfigMap\nmetadata: {name: a}\n"
	for name, tc := range map[string]struct {
		in    string
		lines []int
	}{
		"yaml":                {cm, []int{1}},
		"many":                {"# head\n---\n" + cm + "---\n# only a comment\n---\n" + cm, []int{3, 9}},
		"separator in text":   {cm + "data:\n  k: |\n    a\n    ---\n    b\n---\n" + cm, []int{1, 10}},
		"byte order mark":     {"\xef\xbb\xbf" + cm, []int{1}},
		"joined marks":        {"\xef\xbb\xbf" + cm + "---\n\xef\xbb\xbf" + cm, []int{1, 5}},
		"crlf":                {strings.ReplaceAll(cm+"---\n"+cm, "\n", "\r\n"), []int{1, 5}},
		"empty":               {"", nil},
		"comments":            {"# nothing\n---\n# here\n", nil},
		"json":                {`{"apiVersion":"v1","kind":"ConfigMap","metadata":{"name":"a"},"data":{"k":"\ud83d\ude00"}}`, []int{1}},
		"json twice":          {"{\"apiVersion\":\"v1\",\"kind\":\"ConfigMap\"}\n{\"apiVersion\":\"v1\",\n\"kind\":\"ConfigMap\"}", []int{1, 2}},
		"flow yaml":           {"{apiVersion: v1, kind: ConfigMap} # not JSON\n", []int{1}},
		"json then separator": {"{\"apiVersion\": \"v1\", \"kind\": \"ConfigMap\"}\n---\n" + cm, []int{1, 3}},
		"list":                {"apiVersion: v1\nkind: List\nitems:\n- apiVersion: v1\n  kind: ConfigMap\n- apiVersion: v1\n  kind: Secret\n", []int{4, 6}},
		"typed list":          {"apiVersion: v1\nkind: ConfigMapList\nmetadata: {}\nitems:\n- metadata: {name: a}\n", []int{5}},
		"nested list":         {"apiVersion: v1\nkind: List\nitems:\n- apiVersion: v1\n  kind: List\n  items:\n  - {apiVersion: v1, kind: ConfigMap}\n", []int{7}},
		"merge and anchors":   {"apiVersion: v1\nkind: ConfigMap\nmetadata: &m {name: a, labels: {x: z}}\ndata:\n  <<: {k: v, l: w}\n  k: own\n", []int{1}},
		"cbor":                {string(cborCM), []int{0}},
	} {
		t.Run(name, func(t *testing.T) {
			docs, err := decode(t, tc.in)
			if err != nil {
				t.Fatal(err)
			}
			var lines []int
			for _, d := range docs {
				lines = append(lines, d.Line)
				if d.Object == nil || d.Kind == nil || !strings.Contains(string(d.JSON), `"kind":"`+d.Kind.GVK.Kind+`"`) {
					t.Errorf("document %+v", d)
				}
			}
			if fmt.Sprint(lines) != fmt.Sprint(tc.lines) {
				t.Fatalf("lines %v, want %v", lines, tc.lines)
			}
		})
	}
	docs, err := decode(t, "apiVersion: v1\nkind: ConfigMap\ndata:\n  <<: {k: v, l: w}\n  k: own\n")
	if err != nil || docs[0].Object.(*corev1.ConfigMap).Data["k"] != "own" || docs[0].Object.(*corev1.ConfigMap).Data["l"] != "w" {
		t.Fatal(docs, err)
	}
}

// Each fault is one line that names place, path, reason and what to do.
func TestDecodeFaults(t *testing.T) {
	cm := func(data string) string { return "apiVersion: v1\nkind: ConfigMap\nmetadata:\n  name: a\n" + data }
	for _, tc := range []struct {
		name, in string
		want     []string // one per error, in order; each a list of parts joined by "|"
	}{
		// L01
		{"envFrom twice", podWith("    envFrom:\n    - configMapRef: {name: a}\n    envFrom:\n    - secretRef: {name: b}\n"),
			[]string{`f.yaml:11:5: |duplicate key "envFrom", first on line 9`}},
		{"top level twice", cm("metadata:\n  name: b\n"), []string{`f.yaml:5:1|duplicate key "metadata", first on line 3`}},
		{"in a merge key", cm("data:\n  <<: {a: b, a: c}\n"), []string{`duplicate key "a", first on line 6`}},
		{"merge key twice", cm("data:\n  <<: {a: b}\n  <<: {a: c}\n"), []string{`f.yaml:7:3|duplicate key "<<", first on line 6`}},
		{"in an anchor", cm("data: &x\n  a: b\n  a: c\n"), []string{`f.yaml:7:3|first on line 6`}},
		{"json twice", "{\"apiVersion\":\"v1\",\n\"kind\":\"ConfigMap\",\n\"kind\":\"Secret\"}", []string{`f.yaml:3:1|duplicate key "kind", first on line 2`}},
		// L02
		{"misspelt", podWith("    imagePullPolcy: Always\n"), []string{`f.yaml:9:5: spec.containers[0].imagePullPolcy: unknown field|did you mean imagePullPolicy?`}},
		{"case", podWith("    workingdir: /\n"), []string{`did you mean workingDir?`}},
		{"mis-indented", podWith("    resources:\n    requests:\n      cpu: 1\n"),
			[]string{`f.yaml:10:5: spec.containers[0].requests: unknown field|it belongs under "resources", which is empty on line 9: indent it`}},
		{"level", podHead + "containers:\n- name: c\n", []string{`containers: unknown field|belongs under spec`}},
		// L05
		{"half a byte", podWith("    resources: {limits: {memory: 0.5}}\n"), []string{`spec.containers[0].resources.limits[memory]: 0.5 is a fraction of a byte|0.5Gi or 0.5Mi`}},
		{"bare point", podWith("    resources: {limits: {memory: .5}}\n"), []string{`fraction of a byte`}},
		{"quoted half", podWith("    resources: {limits: {memory: \"0.5\"}}\n"), []string{`fraction of a byte`}},
		{"milli memory", podWith("    resources: {limits: {memory: 400m}}\n"), []string{`400m is thousandths of a byte|did you mean 400Mi or 400M?`}},
		{"1g", podWith("    resources: {limits: {memory: 1g}}\n"), []string{`not a quantity|write G or Gi`}},
		{"1K", podWith("    resources: {limits: {memory: 1K}}\n"), []string{`write k or Ki`}},
		{"hex", podWith("    resources: {limits: {memory: 0x10}}\n"), []string{`write it in decimal`}},
		{"octal", podWith("    resources: {limits: {cpu: 010}}\n"), []string{`write it in decimal`}},
		{"underscore", podWith("    resources: {limits: {memory: 1_000}}\n"), []string{`write 1000`}},
		{"empty", podWith("    resources: {limits: {memory: \"\"}}\n"), []string{`leave the field out`}},
		{"nan", podWith("    resources: {limits: {memory: .NaN}}\n"), []string{`not a quantity`}},
		{"NaN", podWith("    resources: {limits: {memory: NaN}}\n"), []string{`not a quantity`}},
		{"9Ei", podWith("    resources: {limits: {memory: 9Ei}}\n"), []string{`more than a quantity can hold`}},
		{"endless exponent", podWith("    resources: {limits: {memory: 1e999999999}}\n"), []string{`not a quantity (no quantity needs so many digits)`}},
		{"endless fraction", podWith("    resources: {limits: {cpu: 1e-999999999}}\n"), []string{`not a quantity`}},
		{"endless number", podHead + "spec: {terminationGracePeriodSeconds: 1e-999999999}\n", []string{`not a whole number`}},
		{"yes", cm("data: {a: yes}\n"), []string{`f.yaml:5:11: data[a]: is a boolean (yes), not a string (quote it: "yes")`}},
		{"no on off", cm("  labels: {a: no, b: on, c: off, d: true}\n"), []string{`(no)`, `(on)`, `(off)`, `(true)`}},
		{"version", cm("  labels: {version: 1.20}\n"), []string{`metadata.labels[version]: is a number (1.20), not a string (quote it: "1.20")`}},
		{"port as string", podWith("    ports: [{containerPort: \"80\"}]\n"), []string{`is a string ("80"), not a whole number (write 80 without quotes)`}},
		{"port with colon", podWith("    ports: [{containerPort: 22:22}]\n"), []string{`is a string ("22:22"), not a whole number`}},
		{"port too large", podWith("    ports: [{containerPort: 99999999999}]\n"), []string{`too large`}},
		{"port octal", podWith("    ports: [{containerPort: 0080}]\n"), []string{`not a whole number`}},
		{"target port", "apiVersion: v1\nkind: Service\nspec: {ports: [{port: 80, targetPort: \"8080\"}]}\n", []string{`which would be a name|write 8080 without quotes`}},
		// Types
		{"quoted boolean", podWith("    tty: \"true\"\n"), []string{`write true without quotes`}},
		{"list for mapping", podHead + "spec:\n- containers: []\n", []string{`spec: is a list, not a mapping (remove the "- ")`}},
		{"mapping for list", podHead + "spec:\n  containers:\n    name: c\n", []string{`spec.containers: is a mapping, not a list (each entry begins with "- ")`}},
		{"secret text", "apiVersion: v1\nkind: Secret\ndata:\n  k: hunter2!\n", []string{`data[k]: is not base64 (plain text goes under stringData)`}},
		{"time", podHead + "  creationTimestamp: yesterday\n", []string{`not a time`}},
		// Kinds
		{"near kind", "apiVersion: apps/v1\nkind: Deploymnt\n", []string{`f.yaml:2:7: kind: "Deploymnt" of "apps/v1" is not served (did you mean Deployment (apps/v1)?)`}},
		{"old version", "apiVersion: extensions/v1beta1\nkind: Deployment\n", []string{`f.yaml:1:13: apiVersion: Deployment is not served in "extensions/v1beta1" (write apiVersion: apps/v1)`}},
		{"no kind", "apiVersion: v1\nknd: Pod\n", []string{`kind is missing (there is knd; did you mean kind?)`}},
		{"no version", "kind: Pod\n", []string{`apiVersion is missing`}},
		{"text", "hello\n", []string{`is a string ("hello"), not an object`}},
		{"array", "- a\n", []string{`is a list, not an object`}},
		{"items", "apiVersion: v1\nkind: List\nitems: {}\n", []string{`items: is a mapping, not a list`}},
		{"item path", "apiVersion: v1\nkind: List\nitems:\n- apiVersion: v1\n  kind: Pod\n  spec: 1\n", []string{`f.yaml:6:9: items[0].spec: is a number (1), not a mapping`}},
		// Syntax
		{"tab", "apiVersion: v1\nkind: ConfigMap\ndata:\n\ta: b\n", []string{`f.yaml:4: not valid YAML|tab`}},
		{"separator in a block string", cm("data:\n  a: |\n    x\n---\n    y\n  b: z\n"), []string{`not valid YAML|(the --- of line 8 begins another document; as text of a block string it must be indented)`}},
		{"separator before the rest of a block string", cm("data:\n  a: |\n    x\n---\n    word\n"), []string{`is a string ("word"), not an object (the --- of line 8 begins another document`}},
		{"colon", "a: b: c\n", []string{`not valid YAML`}},
		{"json syntax", "{\"apiVersion\":\"v1\",\n\"kind\":}", []string{`f.yaml:2:8: not valid JSON`}},
		{"cycle", "a: &x [*x]\n", []string{`inside its own anchor`}},
		{"key", cm("data: {yes: a}\n"), []string{`the key yes is not a string`}},
		{"complex key", cm("data:\n  ? [a]\n  : b\n"), []string{`a key must be a string`}},
		// More than one
		{"several", podWith("    tty: 1\n    imge: x\n    ports: 3\n"), []string{`tty: is a number`, `imge: unknown field`, `ports: is a number (3), not a list`}},
	} {
		t.Run(tc.name, func(t *testing.T) {
			_, err := decode(t, tc.in)
			var errs Errors
			if !errors.As(err, &errs) || len(errs) != len(tc.want) {
				t.Fatalf("got %v, want %q", err, tc.want)
			}
			for i, e := range errs {
				line := e.Error()
				for _, part := range strings.Split(tc.want[i], "|") {
					if !strings.Contains(line, part) {
						t.Errorf("%s\nlacks %s", line, part)
					}
				}
				if strings.Contains(line, "\n") {
					t.Errorf("more than one line: %q", line)
				}
			}
		})
	}
}

// What Windows' programs write as "Unicode" is read as what it says.
func TestDecodeUTF16(t *testing.T) {
	for _, text := range []string{"apiVersion: v1\nkind: ConfigMap\ndata: {a: \"\u00e9\U0001f426\"}\n", "{\"apiVersion\":\"v1\",\"kind\":\"ConfigMap\",\"data\":{\"a\":\"\u00e9\U0001f426\"}}"} {
		for _, o := range []binary.AppendByteOrder{binary.LittleEndian, binary.BigEndian} {
			in := o.AppendUint16(nil, 0xfeff)
			for _, u := range utf16.Encode([]rune(text)) {
				in = o.AppendUint16(in, u)
			}
			docs, err := decode(t, string(in))
			if err != nil || len(docs) != 1 || docs[0].Object.(*corev1.ConfigMap).Data["a"] != "\u00e9\U0001f426" {
				t.Errorf("%s: %v %v", o, docs, err)
			}
		}
	}
}

func TestDecodeQuantitiesThatAreRight(t *testing.T) {
	for in, want := range map[string]string{
		"1e3": "1e3", "1E3": "1E3", `"1E3"`: "1E3", "1Gi": "1Gi", "1G": "1G", "128974848": "128974848", "1.5Ki": "1536",
		"2.7Gi": "2899102924800m", "64Mi": "64Mi", "1k": "1k", "-1": "-1", "0": "0",
	} {
		docs, err := decode(t, podWith("    resources: {limits: {memory: "+in+"}}\n"))
		if err != nil {
			t.Errorf("%s: %v", in, err)
			continue
		}
		q := docs[0].Object.(*corev1.Pod).Spec.Containers[0].Resources.Limits[corev1.ResourceMemory]
		if q.String() != want {
			t.Errorf("%s is %s, want %s", in, q.String(), want)
		}
	}
	for _, in := range []string{"100m", "0.5", ".5", "2", "1e3"} {
		if _, err := decode(t, podWith("    resources: {limits: {cpu: "+in+"}}\n")); err != nil {
			t.Errorf("cpu %s: %v", in, err)
		}
	}
}

func TestDecodeKeepsModesAndIntOrString(t *testing.T) {
	docs, err := decode(t, podHead+"spec:\n  volumes:\n  - {name: v, configMap: {name: c, defaultMode: 0440}}\n  - {name: w, secret: {secretName: s, defaultMode: 0o400}}\n  containers: [{name: c, image: a}]\n")
	if err != nil {
		t.Fatal(err)
	}
	v := docs[0].Object.(*corev1.Pod).Spec.Volumes
	if *v[0].ConfigMap.DefaultMode != 0o440 || *v[1].Secret.DefaultMode != 0o400 {
		t.Fatal(v)
	}
	docs, err = decode(t, "apiVersion: apps/v1\nkind: Deployment\nspec: {strategy: {rollingUpdate: {maxSurge: 1, maxUnavailable: 25%}}}\n")
	if err != nil {
		t.Fatal(err)
	}
	r := docs[0].Object.(*appsv1.Deployment).Spec.Strategy.RollingUpdate
	if r.MaxSurge.IntValue() != 1 || r.MaxUnavailable.StrVal != "25%" {
		t.Fatal(r)
	}
}

func TestDecodeBounds(t *testing.T) {
	bomb := "a: &a [x,x,x,x,x,x,x,x,x,x]\n"
	for c := 'b'; c < 'k'; c++ {
		bomb += fmt.Sprintf("%c: &%c [*%c,*%c,*%c,*%c,*%c,*%c,*%c,*%c,*%c]\n", c, c, c-1, c-1, c-1, c-1, c-1, c-1, c-1, c-1, c-1)
	}
	for name, tc := range map[string]struct {
		in, want string
		o        Options
	}{
		"alias bomb":  {bomb, "expands to more than", Options{}},
		"deep yaml":   {strings.Repeat("[", 5000) + strings.Repeat("]", 5000), "deeper", Options{}},
		"deep json":   {strings.Repeat(`{"a":`, 5000) + "1" + strings.Repeat("}", 5000), "deeper", Options{}},
		"total":       {strings.Repeat("#", 2000), "larger than 1000 bytes", Options{MaxBytes: 1000}},
		"document":    {"apiVersion: v1\nkind: ConfigMap\ndata:\n  a: " + strings.Repeat("x", 4<<20), "bytes", Options{}},
		"documents":   {strings.Repeat("apiVersion: v1\nkind: ConfigMap\n---\n", 20), "more than 5 objects", Options{MaxDocuments: 5}},
		"many faults": {"apiVersion: v1\nkind: ConfigMap\ndata:\n" + numbered(100), "and 80 more faults", Options{}},
	} {
		t.Run(name, func(t *testing.T) {
			_, err := Decode(strings.NewReader(tc.in), tc.o)
			if err == nil || !strings.Contains(err.Error(), tc.want) {
				t.Fatalf("got %.300v, want %s", err, tc.want)
			}
		})
	}
}

func numbered(n int) string {
	var b strings.Builder
	for i := range n {
		fmt.Fprintf(&b, "  k%d: %d\n", i, i)
	}
	return b.String()
}

func TestDecodeLenient(t *testing.T) {
	docs, err := Decode(strings.NewReader(podWith("    imagePullPolcy: Always\n")), Options{File: "f", Lenient: true})
	if err != nil || len(docs) != 1 || len(docs[0].Warnings) != 1 || !strings.Contains(docs[0].Warnings[0], "f:9:5: spec.containers[0].imagePullPolcy: unknown field") {
		t.Fatal(docs, err)
	}
}

func FuzzDecode(f *testing.F) {
	for _, s := range []string{
		podWith("    resources: {limits: {memory: 400m}}\n"), "a: &a [*a]\n", "{\"a\":1}{\"b\":", "\xd9\xd9\xf7\xa1aaa", "<<: [*a]\n", "\ufeff---\n", "? a\n: b\n",
		"apiVersion: v1\nkind: List\nitems:\n- kind: Secret\n  apiVersion: v1\n  data: {a: b}\n", "!!binary a: !!str 1\n", "%YAML 1.1\n---\na: 0o7\n",
		"apiVersion: v1\nkind: Pod\nspec: {terminationGracePeriodSeconds: 1e999999999}\n", "apiVersion: v1\nkind: Pod\nspec: {overhead: {cpu: 1e999999999}}\n",
		"{\"apiVersion\":\"v1\",\"kind\":\"Pod\",\"spec\":{\"overhead\":{\"cpu\":\"1E-999999999\"}}}",
	} {
		f.Add([]byte(s))
	}
	f.Fuzz(func(t *testing.T, data []byte) {
		docs, err := Decode(strings.NewReader(string(data)), Options{MaxBytes: 1 << 16, MaxDocuments: 100})
		var errs Errors
		if err != nil && !errors.As(err, &errs) {
			t.Fatalf("error of type %T", err)
		}
		for _, d := range docs {
			// What was taken is taken again, and means the same.
			again, err := Decode(strings.NewReader(string(d.JSON)), Options{})
			if err != nil || len(again) != 1 || string(again[0].JSON) != string(d.JSON) {
				t.Fatalf("%s\n%v", d.JSON, err)
			}
			Default(d.Object)
			Validate(d.Object)
			ValidateUpdate(d.Object, d.Object)
			Unsupported(d.Object)
		}
	})
}

// TestLineOf finds the line of a field that the API names, or of what it would
// stand in.
func TestLineOf(t *testing.T) {
	docs, err := Decode(strings.NewReader(`# a comment
apiVersion: v1
kind: Pod
metadata:
  name: x
  annotations:
    dunlin.dev/outbound: "y"
spec:
  containers:
  - name: a
    image: b
  - name: c
    image: d
    ports:
    - containerPort: 1
`), Options{})
	if err != nil {
		t.Fatal(err)
	}
	for path, want := range map[string]int{
		"spec.containers[1].image": 13, "spec.containers[1].ports[0].containerPort": 15, "spec.containers[1].ports[0].hostPort": 15,
		"spec.containers[1]": 12, "spec.containers[7].image": 9, "metadata.annotations[dunlin.dev/outbound]": 7, "metadata.name": 5,
		"spec.nodeName": 8, "status": 0, "": 0, "[": 0, "a[b": 0,
	} {
		if got := docs[0].LineOf(path); got != want {
			t.Errorf("%s: line %d, want %d", path, got, want)
		}
	}
}

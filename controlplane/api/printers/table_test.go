package printers

import (
	"encoding/json"
	"reflect"
	"strings"
	"testing"
	"time"

	appsv1 "k8s.io/api/apps/v1"
	batchv1 "k8s.io/api/batch/v1"
	coordinationv1 "k8s.io/api/coordination/v1"
	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	eventsv1 "k8s.io/api/events/v1"
	networkingv1 "k8s.io/api/networking/v1"
	nodev1 "k8s.io/api/node/v1"
	policyv1 "k8s.io/api/policy/v1"
	schedulingv1 "k8s.io/api/scheduling/v1"
	storagev1 "k8s.io/api/storage/v1"
	"k8s.io/apimachinery/pkg/api/meta"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/util/intstr"

	"github.com/dunlin-project/dunlin/manifests"
)

// The columns of a real server: * is priority 1, :type if not string.
var columns = map[string]string{
	"deployments":             "Name, Ready, Up-to-date, Available, Age, Containers*, Images*, Selector*",
	"services":                "Name, Type, Cluster-IP, External-IP, Port(s), Age, Selector*",
	"pods":                    "Name, Ready, Status, Restarts, Age, IP*, Node*, Nominated Node*, Readiness Gates*",
	"nodes":                   "Name, Status, Roles, Age, Version, Internal-IP*, External-IP*, OS-Image*, Kernel-Version*, Container-Runtime*",
	"replicasets":             "Name, Desired:integer, Current:integer, Ready:integer, Age, Containers*, Images*, Selector*",
	"statefulsets":            "Name, Ready, Age, Containers*, Images*",
	"daemonsets":              "Name, Desired:integer, Current:integer, Ready:integer, Up-to-date:integer, Available:integer, Node Selector, Age, Containers*, Images*, Selector*",
	"events":                  "Last Seen, Type, Reason, Object, Subobject*, Source*, Message, First Seen*, Count*, Name*",
	"configmaps":              "Name, Data, Age",
	"secrets":                 "Name, Type, Data, Age",
	"namespaces":              "Name, Status, Age",
	"serviceaccounts":         "Name, Age",
	"leases":                  "Name, Holder, Age",
	"endpoints":               "Name, Endpoints, Age",
	"endpointslices":          "Name, AddressType, Ports, Endpoints, Age",
	"priorityclasses":         "Name, Value:integer, Global-Default:boolean, Age, PreemptionPolicy",
	"runtimeclasses":          "Name, Handler, Age",
	"replicationcontrollers":  "Name, Desired:integer, Current:integer, Ready:integer, Age, Containers*, Images*, Selector*",
	"resourcequotas":          "Name, Request, Limit, Age",
	"limitranges":             "Name, Created At:date",
	"controllerrevisions":     "Name, Controller, Revision, Age",
	"jobs":                    "Name, Status, Completions, Duration, Age, Containers*, Images*, Selector*",
	"cronjobs":                "Name, Schedule, Timezone, Suspend:boolean, Active:integer, Last Schedule, Age, Containers*, Images*, Selector*",
	"poddisruptionbudgets":    "Name, Min Available, Max Unavailable, Allowed Disruptions:integer, Age",
	"persistentvolumes":       "Name, Capacity, Access Modes, Reclaim Policy, Status, Claim, StorageClass, VolumeAttributesClass, Reason, Age, VolumeMode*",
	"persistentvolumeclaims":  "Name, Status, Volume, Capacity, Access Modes, StorageClass, VolumeAttributesClass, Age, VolumeMode*",
	"storageclasses":          "Name, Provisioner, ReclaimPolicy, VolumeBindingMode, AllowVolumeExpansion, Age",
	"csinodes":                "Name, Drivers:integer, Age",
	"csidrivers":              "Name, AttachRequired:boolean, PodInfoOnMount:boolean, StorageCapacity:boolean, TokenRequests, RequiresRepublish:boolean, Modes, Age",
	"csistoragecapacities":    "Name, StorageClassName, Capacity",
	"volumeattachments":       "Name, Attacher, PV, Node, Attached:boolean, Age",
	"volumeattributesclasses": "Name, DriverName, Age",
	"podtemplates":            "Name, Containers, Images, Pod Labels",
	"ingresses":               "Name, Class, Hosts, Address, Ports, Age",
	"ingressclasses":          "Name, Controller, Parameters, Age",
}

func describe(list []metav1.TableColumnDefinition) string {
	var out []string
	for _, c := range list {
		s := c.Name
		if c.Priority > 0 {
			s += "*"
		}
		if c.Type != "string" {
			s += ":" + c.Type
		}
		out = append(out, s)
	}
	return strings.Join(out, ", ")
}

// TestEveryServedKind: each has the columns of the real server, also for an
// empty list; the zero object prints without a panic; every row has a cell a
// column.
func TestEveryServedKind(t *testing.T) {
	for _, k := range manifests.Kinds() {
		want, ok := columns[k.Resource]
		if !ok {
			t.Errorf("%s: the columns of this kind are not in the test: look them up and add them", k.Resource)
			continue
		}
		for _, obj := range []runtime.Object{k.New(), k.NewList()} {
			tab, err := Table(obj, Options{Now: now})
			if err != nil {
				t.Errorf("%T: %v", obj, err)
				continue
			}
			if got := describe(tab.ColumnDefinitions); got != want {
				t.Errorf("%T:\n got %s\nwant %s", obj, got, want)
			}
			for _, r := range tab.Rows {
				if len(r.Cells) != len(tab.ColumnDefinitions) {
					t.Errorf("%T: %d cells for %d columns", obj, len(r.Cells), len(tab.ColumnDefinitions))
				}
			}
			for _, c := range tab.ColumnDefinitions {
				if (c.Name == "Name" || c.Name == "Attacher") != (c.Format == "name") {
					t.Errorf("%T: column %s has format %q", obj, c.Name, c.Format)
				}
			}
		}
	}
}

// TestRowsSayTheirKind: clients decode each row's object by itself (kubectl
// get --sort-by does, and prints nothing for those without a kind). The items
// of a list have none, and stay as they are.
func TestRowsSayTheirKind(t *testing.T) {
	for _, k := range manifests.Kinds() {
		list := k.NewList()
		item := k.New()
		if err := meta.SetList(list, []runtime.Object{item}); err != nil {
			t.Fatal(err)
		}
		for policy, want := range map[metav1.IncludeObjectPolicy]schema.GroupVersionKind{
			metav1.IncludeObject:   k.GVK,
			metav1.IncludeMetadata: metav1.SchemeGroupVersion.WithKind("PartialObjectMetadata"),
			"":                     metav1.SchemeGroupVersion.WithKind("PartialObjectMetadata"),
		} {
			tab, err := Table(list, Options{Now: now, IncludeObject: policy})
			if err != nil {
				t.Fatalf("%s %q: %v", k.Resource, policy, err)
			}
			if got := tab.Rows[0].Object.Object.GetObjectKind().GroupVersionKind(); got != want {
				t.Errorf("%s includeObject=%q: a row's object is %s, want %s", k.Resource, policy, got, want)
			}
		}
		if err := meta.EachListItem(list, func(o runtime.Object) error {
			if got := o.GetObjectKind().GroupVersionKind(); !got.Empty() {
				t.Errorf("%s: the list's item was changed to %s", k.Resource, got)
			}
			return nil
		}); err != nil {
			t.Fatal(err)
		}
	}
}

func cellsOf(t *testing.T, obj runtime.Object) []any {
	t.Helper()
	tab, err := Table(obj, Options{Now: now})
	if err != nil {
		t.Fatal(err)
	}
	return tab.Rows[0].Cells
}

func ptr[T any](v T) *T { return &v }

func named(name string) metav1.ObjectMeta {
	return metav1.ObjectMeta{Name: name, CreationTimestamp: ago(3 * 24 * time.Hour)}
}

func TestCells(t *testing.T) {
	template := corev1.PodTemplateSpec{
		ObjectMeta: metav1.ObjectMeta{Labels: map[string]string{"app": "a"}},
		Spec:       corev1.PodSpec{Containers: []corev1.Container{{Name: "one", Image: "x:1"}, {Name: "two", Image: "y:2"}}},
	}
	selector := &metav1.LabelSelector{MatchLabels: map[string]string{"app": "a"}}
	for _, c := range []struct {
		name string
		obj  runtime.Object
		want []any
	}{
		{"deployment", &appsv1.Deployment{
			ObjectMeta: named("d"), Spec: appsv1.DeploymentSpec{Replicas: ptr[int32](3), Selector: selector, Template: template},
			Status: appsv1.DeploymentStatus{ReadyReplicas: 2, UpdatedReplicas: 3, AvailableReplicas: 1},
		}, []any{"d", "2/3", int64(3), int64(1), "3d", "one,two", "x:1,y:2", "app=a"}},
		{"deployment with a bad selector", &appsv1.Deployment{
			ObjectMeta: named("d"), Spec: appsv1.DeploymentSpec{Selector: &metav1.LabelSelector{MatchExpressions: []metav1.LabelSelectorRequirement{{Key: "a", Operator: "?"}}}},
		}, []any{"d", "0/1", int64(0), int64(0), "3d", "", "", "<invalid>"}},
		{"replica set", &appsv1.ReplicaSet{
			ObjectMeta: named("r"), Spec: appsv1.ReplicaSetSpec{Replicas: ptr[int32](0), Selector: selector, Template: template},
			Status: appsv1.ReplicaSetStatus{Replicas: 2, ReadyReplicas: 1},
		}, []any{"r", int64(0), int64(2), int64(1), "3d", "one,two", "x:1,y:2", "app=a"}},
		{"replication controller", &corev1.ReplicationController{
			ObjectMeta: named("r"), Spec: corev1.ReplicationControllerSpec{Replicas: ptr[int32](1), Selector: map[string]string{"b": "2", "a": "1"}, Template: &template},
		}, []any{"r", int64(1), int64(0), int64(0), "3d", "one,two", "x:1,y:2", "a=1,b=2"}},
		{"stateful set", &appsv1.StatefulSet{
			ObjectMeta: named("s"), Spec: appsv1.StatefulSetSpec{Replicas: ptr[int32](2), Template: template}, Status: appsv1.StatefulSetStatus{ReadyReplicas: 1},
		}, []any{"s", "1/2", "3d", "one,two", "x:1,y:2"}},
		{"daemon set", &appsv1.DaemonSet{
			ObjectMeta: named("s"), Spec: appsv1.DaemonSetSpec{Selector: selector, Template: template},
			Status: appsv1.DaemonSetStatus{DesiredNumberScheduled: 5, CurrentNumberScheduled: 4, NumberReady: 3, UpdatedNumberScheduled: 2, NumberAvailable: 1},
		}, []any{"s", int64(5), int64(4), int64(3), int64(2), int64(1), "<none>", "3d", "one,two", "x:1,y:2", "app=a"}},
		{"job", &batchv1.Job{
			ObjectMeta: named("j"), Spec: batchv1.JobSpec{Completions: ptr[int32](3), Selector: selector, Template: template},
			Status: batchv1.JobStatus{Succeeded: 1, StartTime: ptr(ago(time.Minute))},
		}, []any{"j", "Running", "1/3", "60s", "3d", "one,two", "x:1,y:2", "app=a"}},
		{"finished job", &batchv1.Job{
			ObjectMeta: named("j"), Spec: batchv1.JobSpec{Parallelism: ptr[int32](2), Selector: selector, Template: template},
			Status: batchv1.JobStatus{StartTime: ptr(ago(time.Hour)), CompletionTime: ptr(ago(0)), Conditions: []batchv1.JobCondition{
				{Type: batchv1.JobFailureTarget, Status: corev1.ConditionTrue}, {Type: batchv1.JobFailed, Status: corev1.ConditionTrue}}},
		}, []any{"j", "Failed", "0/1 of 2", "60m", "3d", "one,two", "x:1,y:2", "app=a"}},
		{"cron job", &batchv1.CronJob{
			ObjectMeta: named("c"), Spec: batchv1.CronJobSpec{Schedule: "@daily", TimeZone: ptr("Etc/UTC"), Suspend: ptr(false), JobTemplate: batchv1.JobTemplateSpec{Spec: batchv1.JobSpec{Template: template}}},
			Status: batchv1.CronJobStatus{Active: []corev1.ObjectReference{{}}, LastScheduleTime: ptr(ago(time.Hour))},
		}, []any{"c", "@daily", "Etc/UTC", "False", int64(1), "60m", "3d", "one,two", "x:1,y:2", "<none>"}},
		{"disruption budget", &policyv1.PodDisruptionBudget{
			ObjectMeta: named("b"), Spec: policyv1.PodDisruptionBudgetSpec{MinAvailable: ptr(intstr.FromString("50%"))},
			Status: policyv1.PodDisruptionBudgetStatus{DisruptionsAllowed: 2},
		}, []any{"b", "50%", "N/A", int64(2), "3d"}},
		{"controller revision", &appsv1.ControllerRevision{
			ObjectMeta: metav1.ObjectMeta{Name: "c", CreationTimestamp: ago(time.Second), OwnerReferences: []metav1.OwnerReference{{APIVersion: "apps/v1", Kind: "StatefulSet", Name: "s", Controller: ptr(true)}}},
			Revision:   4,
		}, []any{"c", "statefulset.apps/s", int64(4), "1s"}},
		{"cluster IP", &corev1.Service{
			ObjectMeta: named("s"), Spec: corev1.ServiceSpec{Type: corev1.ServiceTypeClusterIP, ClusterIP: "10.43.0.1", ClusterIPs: []string{"10.43.0.1"}, Selector: map[string]string{"app": "a"}, Ports: []corev1.ServicePort{{Port: 80, Protocol: "TCP"}, {Port: 53, Protocol: "UDP"}}},
		}, []any{"s", "ClusterIP", "10.43.0.1", "<none>", "80/TCP,53/UDP", "3d", "app=a"}},
		{"headless", &corev1.Service{
			ObjectMeta: named("s"), Spec: corev1.ServiceSpec{Type: corev1.ServiceTypeClusterIP, ClusterIP: "None"},
		}, []any{"s", "ClusterIP", "None", "<none>", "<none>", "3d", "<none>"}},
		{"node port", &corev1.Service{
			ObjectMeta: named("s"), Spec: corev1.ServiceSpec{Type: corev1.ServiceTypeNodePort, ClusterIP: "10.43.0.1", ExternalIPs: []string{"1.2.3.4", "5.6.7.8"}, Ports: []corev1.ServicePort{{Port: 80, NodePort: 30080, Protocol: "TCP"}}},
		}, []any{"s", "NodePort", "10.43.0.1", "1.2.3.4,5.6.7.8", "80:30080/TCP", "3d", "<none>"}},
		{"load balancer pending", &corev1.Service{
			ObjectMeta: named("s"), Spec: corev1.ServiceSpec{Type: corev1.ServiceTypeLoadBalancer, ClusterIP: "10.43.0.1"},
		}, []any{"s", "LoadBalancer", "10.43.0.1", "<pending>", "<none>", "3d", "<none>"}},
		{"load balancer", &corev1.Service{
			ObjectMeta: named("s"), Spec: corev1.ServiceSpec{Type: corev1.ServiceTypeLoadBalancer, ClusterIP: "10.43.0.1", ExternalIPs: []string{"9.9.9.9"}},
			Status: corev1.ServiceStatus{LoadBalancer: corev1.LoadBalancerStatus{Ingress: []corev1.LoadBalancerIngress{{Hostname: "lb.example"}, {IP: "1.1.1.1"}}}},
		}, []any{"s", "LoadBalancer", "10.43.0.1", "1.1.1.1,lb.example,9.9.9.9", "<none>", "3d", "<none>"}},
		{"external name", &corev1.Service{
			ObjectMeta: named("s"), Spec: corev1.ServiceSpec{Type: corev1.ServiceTypeExternalName, ExternalName: "a.example"},
		}, []any{"s", "ExternalName", "<none>", "a.example", "<none>", "3d", "<none>"}},
		{"endpoint slice", &discoveryv1.EndpointSlice{
			ObjectMeta: named("e"), AddressType: discoveryv1.AddressTypeIPv4, Ports: []discoveryv1.EndpointPort{{Port: ptr[int32](80)}, {Name: ptr("x")}, {}},
			Endpoints: []discoveryv1.Endpoint{{Addresses: []string{"1.1.1.1"}}, {Addresses: []string{"2.2.2.2"}}, {Addresses: []string{"3.3.3.3"}}, {Addresses: []string{"4.4.4.4"}}, {Addresses: []string{"5.5.5.5"}}},
		}, []any{"e", "IPv4", "80,x,*", "1.1.1.1,2.2.2.2,3.3.3.3 + 2 more...", "3d"}},
		{"empty endpoint slice", &discoveryv1.EndpointSlice{ObjectMeta: named("e"), AddressType: discoveryv1.AddressTypeIPv6}, []any{"e", "IPv6", "<unset>", "<unset>", "3d"}},
		{"endpoints", &corev1.Endpoints{
			ObjectMeta: named("e"), Subsets: []corev1.EndpointSubset{
				{Addresses: []corev1.EndpointAddress{{IP: "1.1.1.1"}, {IP: "::1"}}, Ports: []corev1.EndpointPort{{Port: 80}, {Port: 443}}},
				{Addresses: []corev1.EndpointAddress{{IP: "2.2.2.2"}}},
			},
		}, []any{"e", "1.1.1.1:80,[::1]:80,1.1.1.1:443 + 2 more...", "3d"}},
		{"no endpoints", &corev1.Endpoints{ObjectMeta: named("e")}, []any{"e", "<none>", "3d"}},
		{"config map", &corev1.ConfigMap{ObjectMeta: named("c"), Data: map[string]string{"a": ""}, BinaryData: map[string][]byte{"b": nil}}, []any{"c", int64(2), "3d"}},
		{"secret", &corev1.Secret{ObjectMeta: named("s"), Type: corev1.SecretTypeOpaque, Data: map[string][]byte{"a": nil}}, []any{"s", "Opaque", int64(1), "3d"}},
		{"quota", &corev1.ResourceQuota{ObjectMeta: named("q"), Status: corev1.ResourceQuotaStatus{
			Hard: corev1.ResourceList{"limits.cpu": resource.MustParse("2"), "pods": resource.MustParse("4"), "cpu": resource.MustParse("1")},
			Used: corev1.ResourceList{"pods": resource.MustParse("1"), "cpu": resource.MustParse("500m")},
		}}, []any{"q", "cpu: 500m/1, pods: 1/4", "limits.cpu: 0/2", "3d"}},
		{"volume", &corev1.PersistentVolume{ObjectMeta: named("v"), Spec: corev1.PersistentVolumeSpec{Capacity: corev1.ResourceList{"storage": resource.MustParse("1Gi")},
			AccessModes: []corev1.PersistentVolumeAccessMode{"ReadWriteMany", "ReadWriteOnce"}, PersistentVolumeReclaimPolicy: "Retain", StorageClassName: "slow",
			ClaimRef: &corev1.ObjectReference{Namespace: "n", Name: "c"}}, Status: corev1.PersistentVolumeStatus{Phase: "Bound"}},
			[]any{"v", "1Gi", "RWO,RWX", "Retain", "Bound", "n/c", "slow", "<unset>", "", "3d", "<unset>"}},
		{"claim", &corev1.PersistentVolumeClaim{ObjectMeta: named("c"), Spec: corev1.PersistentVolumeClaimSpec{VolumeName: "v"},
			Status: corev1.PersistentVolumeClaimStatus{Phase: "Bound", Capacity: corev1.ResourceList{"storage": resource.MustParse("1Gi")},
				AccessModes: []corev1.PersistentVolumeAccessMode{"ReadWriteOncePod"}}},
			[]any{"c", "Bound", "v", "1Gi", "RWOP", "", "<unset>", "3d", "<unset>"}},
		{"class", &storagev1.StorageClass{ObjectMeta: metav1.ObjectMeta{Name: "s", CreationTimestamp: named("s").CreationTimestamp,
			Annotations: map[string]string{"storageclass.kubernetes.io/is-default-class": "true"}}, Provisioner: "dunlin.dev/local"},
			[]any{"s (default)", "dunlin.dev/local", "Delete", "Immediate", false, "3d"}},
		{"limit range", &corev1.LimitRange{ObjectMeta: named("l")}, []any{"l", "2026-05-01T12:00:00Z"}},
		{"namespace", &corev1.Namespace{ObjectMeta: named("n"), Status: corev1.NamespaceStatus{Phase: corev1.NamespaceTerminating}}, []any{"n", "Terminating", "3d"}},
		{"lease", &coordinationv1.Lease{ObjectMeta: named("l"), Spec: coordinationv1.LeaseSpec{HolderIdentity: ptr("me")}}, []any{"l", "me", "3d"}},
		{"priority class", &schedulingv1.PriorityClass{ObjectMeta: named("p"), Value: 7, GlobalDefault: true, PreemptionPolicy: ptr(corev1.PreemptNever)}, []any{"p", int64(7), true, "3d", "Never"}},
		{"runtime class", &nodev1.RuntimeClass{ObjectMeta: named("wasm"), Handler: "wazero"}, []any{"wasm", "wazero", "3d"}},
		{"ingress", &networkingv1.Ingress{
			ObjectMeta: named("i"), Spec: networkingv1.IngressSpec{IngressClassName: ptr("dunlin"), TLS: []networkingv1.IngressTLS{{}},
				Rules: []networkingv1.IngressRule{{Host: "a"}, {}, {Host: "b"}, {Host: "c"}, {Host: "d"}}},
			Status: networkingv1.IngressStatus{LoadBalancer: networkingv1.IngressLoadBalancerStatus{Ingress: []networkingv1.IngressLoadBalancerIngress{{IP: "192.0.2.2"}, {Hostname: "192-0-2-1.x"}}}},
		}, []any{"i", "dunlin", "a,b,c + 2 more...", "192-0-2-1.x,192.0.2.2", "80, 443", "3d"}},
		{"plain ingress", &networkingv1.Ingress{ObjectMeta: named("i")}, []any{"i", "<none>", "*", "", "80", "3d"}},
		{"ingress class", &networkingv1.IngressClass{
			ObjectMeta: metav1.ObjectMeta{Name: "c", CreationTimestamp: named("").CreationTimestamp, Annotations: map[string]string{networkingv1.AnnotationIsDefaultIngressClass: "true"}},
			Spec:       networkingv1.IngressClassSpec{Controller: "x/y", Parameters: &networkingv1.IngressClassParametersReference{APIGroup: ptr("g.example"), Kind: "P", Name: "p"}},
		}, []any{"c (default)", "x/y", "P.g.example/p", "3d"}},
		{"pod template", &corev1.PodTemplate{ObjectMeta: named("t"), Template: template}, []any{"t", "one,two", "x:1,y:2", "app=a"}},
		{"never created", &corev1.ServiceAccount{ObjectMeta: metav1.ObjectMeta{Name: "s"}}, []any{"s", "<unknown>"}},
		{"from the future", &corev1.ServiceAccount{ObjectMeta: metav1.ObjectMeta{Name: "s", CreationTimestamp: ago(-time.Hour)}}, []any{"s", "<invalid>"}},
		{"status", &metav1.Status{Status: "Success", Reason: "x", Message: "y"}, []any{"Success", "x", "y"}},
		{"generic", &metav1.PartialObjectMetadata{ObjectMeta: named("g")}, []any{"g", "3d"}},
	} {
		t.Run(c.name, func(t *testing.T) {
			if got := cellsOf(t, c.obj); !reflect.DeepEqual(got, c.want) {
				t.Errorf("\n got %#v\nwant %#v", got, c.want)
			}
		})
	}
}

func TestNodeCells(t *testing.T) {
	node := &corev1.Node{ObjectMeta: named("n")}
	if got := cellsOf(t, node); !reflect.DeepEqual(got, []any{"n", "Unknown", "<none>", "3d", "", "<none>", "<none>", "<unknown>", "<unknown>", "<unknown>"}) {
		t.Errorf("%#v", got)
	}
	node.Spec.Unschedulable = true
	node.Labels = map[string]string{"node-role.kubernetes.io/control-plane": "", "kubernetes.io/role": "edge", "node-role.kubernetes.io/": ""}
	node.Status.Conditions = []corev1.NodeCondition{{Type: corev1.NodeMemoryPressure, Status: corev1.ConditionFalse}, {Type: corev1.NodeReady, Status: corev1.ConditionUnknown}}
	node.Status.Addresses = []corev1.NodeAddress{{Type: corev1.NodeHostName, Address: "n"}, {Type: corev1.NodeInternalIP, Address: "10.0.0.1"}, {Type: corev1.NodeInternalIP, Address: "fd00::1"}}
	node.Status.NodeInfo = corev1.NodeSystemInfo{KubeletVersion: "v1.37.2+dunlin.0.1", OSImage: "Debian", KernelVersion: "6.12", Architecture: "arm64", ContainerRuntimeVersion: "wazero://1.12"}
	want := []any{"n", "NotReady,SchedulingDisabled", "control-plane,edge", "3d", "v1.37.2+dunlin.0.1", "10.0.0.1", "<none>", "Debian", "6.12 (arm64)", "wazero://1.12"}
	if got := cellsOf(t, node); !reflect.DeepEqual(got, want) {
		t.Errorf("\n got %#v\nwant %#v", got, want)
	}
	node.Status.Conditions[1].Status = corev1.ConditionTrue
	node.Spec.Unschedulable = false
	if got := cellsOf(t, node)[1]; got != "Ready" {
		t.Errorf("status %v", got)
	}
}

func TestEventCells(t *testing.T) {
	involved := corev1.ObjectReference{Kind: "Pod", Name: "p", FieldPath: "spec.containers{c}"}
	micro := func(d time.Duration) metav1.MicroTime { return metav1.NewMicroTime(now.Add(-d)) }
	for _, c := range []struct {
		name string
		obj  runtime.Object
		want []any
	}{
		{"counted", &corev1.Event{
			ObjectMeta: named("e"), InvolvedObject: involved, Type: "Warning", Reason: "BackOff", Message: "again\n", Count: 4,
			Source: corev1.EventSource{Component: "agent", Host: "n1"}, FirstTimestamp: ago(time.Hour), LastTimestamp: ago(time.Minute),
		}, []any{"60s", "Warning", "BackOff", "pod/p", "spec.containers{c}", "agent, n1", "again", "60m", int64(4), "e"}},
		{"single, new form", &corev1.Event{
			ObjectMeta: named("e"), InvolvedObject: corev1.ObjectReference{Kind: "Node"}, EventTime: micro(5 * time.Second), ReportingController: "dunlin.dev/scheduler",
		}, []any{"5s", "", "", "node", "", "dunlin.dev/scheduler", "", "5s", int64(1), "e"}},
		{"series", &corev1.Event{
			ObjectMeta: named("e"), InvolvedObject: involved, EventTime: micro(time.Hour), Series: &corev1.EventSeries{Count: 9, LastObservedTime: micro(2 * time.Second)},
		}, []any{"2s", "", "", "pod/p", "spec.containers{c}", "", "", "60m", int64(9), "e"}},
		{"no times", &corev1.Event{ObjectMeta: named("e"), InvolvedObject: involved}, []any{"<unknown>", "", "", "pod/p", "spec.containers{c}", "", "", "<unknown>", int64(1), "e"}},
		{"events.k8s.io", &eventsv1.Event{
			ObjectMeta: named("e"), Regarding: involved, Note: "hello", Type: "Normal", Reason: "Started", EventTime: micro(5 * time.Second),
			ReportingController: "agent", ReportingInstance: "n1",
		}, []any{"5s", "Normal", "Started", "pod/p", "spec.containers{c}", "agent, n1", "hello", "5s", int64(1), "e"}},
	} {
		t.Run(c.name, func(t *testing.T) {
			if got := cellsOf(t, c.obj); !reflect.DeepEqual(got, c.want) {
				t.Errorf("\n got %#v\nwant %#v", got, c.want)
			}
		})
	}
}

func TestIncludeObject(t *testing.T) {
	cm := &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Name: "c", Namespace: "d", UID: "u", ResourceVersion: "7"}, Data: map[string]string{"secret": "x"}}
	for policy, want := range map[metav1.IncludeObjectPolicy]string{
		metav1.IncludeNone:     `"object":null`,
		"":                     `"object":{"kind":"PartialObjectMetadata","apiVersion":"meta.k8s.io/v1","metadata":{"name":"c","namespace":"d"`,
		metav1.IncludeMetadata: `"uid":"u","resourceVersion":"7"`,
		metav1.IncludeObject:   `"data":{"secret":"x"}`,
	} {
		tab, err := Table(cm, Options{Now: now, IncludeObject: policy})
		if err != nil {
			t.Fatal(err)
		}
		b, err := json.Marshal(tab)
		if err != nil {
			t.Fatal(err)
		}
		if !strings.Contains(string(b), want) {
			t.Errorf("%q: %s\nwants %s", policy, b, want)
		}
		if tab.ResourceVersion != "7" || tab.Kind != "Table" || tab.APIVersion != "meta.k8s.io/v1" {
			t.Errorf("%+v", tab.TypeMeta)
		}
	}
	if _, err := Table(cm, Options{IncludeObject: "Everything"}); err == nil {
		t.Error("an unknown policy was accepted")
	}
}

func TestListMetadata(t *testing.T) {
	left := int64(5)
	list := &corev1.ConfigMapList{
		ListMeta: metav1.ListMeta{ResourceVersion: "9", Continue: "token", RemainingItemCount: &left},
		Items:    []corev1.ConfigMap{{ObjectMeta: metav1.ObjectMeta{Name: "a"}}, {ObjectMeta: metav1.ObjectMeta{Name: "b"}}},
	}
	tab, err := Table(list, Options{Now: now, GroupVersion: metav1.SchemeGroupVersion, NoHeaders: true})
	if err != nil {
		t.Fatal(err)
	}
	if tab.ResourceVersion != "9" || tab.Continue != "token" || *tab.RemainingItemCount != 5 || len(tab.Rows) != 2 || tab.ColumnDefinitions != nil {
		t.Errorf("%+v", tab)
	}
	if tab.Rows[1].Cells[0] != "b" {
		t.Errorf("%v", tab.Rows)
	}
}

func TestMixedListIsRefused(t *testing.T) {
	if _, err := TableOf(&corev1.Pod{}, []runtime.Object{&corev1.ConfigMap{}}, metav1.ListMeta{}, Options{}); err == nil {
		t.Error("accepted")
	}
}

module github.com/dunlin-project/dunlin/test/grpc

go 1.26.0

require (
	github.com/dunlin-project/dunlin v0.0.0
	google.golang.org/grpc v1.82.1
)

require (
	github.com/fxamacker/cbor/v2 v2.10.0 // indirect
	github.com/landlock-lsm/go-landlock v0.11.2 // indirect
	github.com/miekg/dns v1.1.73 // indirect
	github.com/vishvananda/netns v0.0.5 // indirect
	github.com/x448/float16 v0.8.4 // indirect
	golang.org/x/net v0.59.0 // indirect
	golang.org/x/sys v0.50.0 // indirect
	golang.org/x/text v0.42.0 // indirect
	google.golang.org/genproto/googleapis/rpc v0.0.0-20260414002931-afd174a4e478 // indirect
	google.golang.org/protobuf v1.36.12 // indirect
	kernel.org/pub/linux/libs/security/libcap/psx v1.2.78 // indirect
)

replace github.com/dunlin-project/dunlin => ../..
